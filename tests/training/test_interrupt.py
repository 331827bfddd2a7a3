"""Ctrl-C in training: the person is told at once, a second one is an ordinary Ctrl-C."""

import signal

import pytest

from deepspec.training.interrupt import Interrupt


def test_the_first_ctrl_c_is_noted_and_answered_the_second_one_stops(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert "Stopping after this step" in capfd.readouterr().err
            assert interrupt.signal == signal.SIGINT and interrupt.exit_code == 130
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_of_several_processes_one_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupt(speaks=False) as interrupt:
        signal.raise_signal(signal.SIGTERM)
    assert interrupt.exit_code == 143
    assert capfd.readouterr().err == ""
