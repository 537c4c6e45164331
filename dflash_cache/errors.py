"""Every error a user can cause, said in one message: where, found, wanted, what to do.

The command line prints `Error: <message>` and exits 1 for a `DFlashError`; anything else is a bug
of ours and keeps its traceback.
"""


class DFlashError(Exception):
    """Base of all errors that a user, a file or a machine can cause."""


class ConfigError(DFlashError):
    """An option has a value that cannot work."""


class DataError(DFlashError):
    """The data set cannot be read, or too many of its rows cannot be used."""


class TargetError(DFlashError):
    """The target model cannot be loaded, or is of a kind that we cannot serve faithfully."""


class ProofError(DFlashError):
    """Hidden states failed a check; the cache would have been silently wrong."""


class CacheError(DFlashError):
    """The cache folder is missing, incomplete, damaged, or something else altogether."""


class CacheMismatchError(CacheError):
    """The cache was built for another target, data set or layout than the one asked for."""


class CacheBusyError(CacheError):
    """Another process is writing in this cache folder."""


class DiskFullError(DFlashError):
    """The disk cannot hold what is to be written."""


class ToldElsewhere(DFlashError):
    """Rank 0 of a build on several machines says this; the other ranks only end badly too."""
