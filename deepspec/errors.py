"""The one exception for mistakes a person can mend."""


class UserError(Exception):
    """Something outside the program is wrong: a file, a key, a row, a combination of settings.

    The message is for the person who meets it: it names the file, row or key, says what was expected and
    what to do. Entry points print it as one sentence, without a traceback, and exit with status 1.
    """
