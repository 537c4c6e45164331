"""Errors of stage two that a user can cause; see `dflash_cache.errors` for the rules."""

from dflash_cache.errors import DFlashError


class FitError(DFlashError):
    """This run cannot start or go on as asked."""


class RunFolderError(DFlashError):
    """A run folder is missing, unreadable, or belongs to another run."""


class DrafterError(DFlashError):
    """A drafter folder is missing, incomplete, or of another shape than it says."""
