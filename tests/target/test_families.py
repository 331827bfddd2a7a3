"""The script that says which families can be targets, on three whose answers are known."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_family_works_or_says_why_not() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "families.py"), "llama", "gpt2", "mamba", "t5", "bart"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    rows = dict.fromkeys(done.stdout.splitlines())
    assert "| llama | yes | yes | yes | yes |  |" in rows
    assert (
        "| gpt2 | yes | yes | yes | yes |  |" in rows
    )  # its head reads what other families' outputs have not
    assert any(row.startswith("| mamba | no | no | no | no | This target has layers of type") for row in rows)
    assert "| bart | ValueError: an encoder and a decoder |" in rows
