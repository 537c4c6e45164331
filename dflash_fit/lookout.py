"""What a growing cache has for a run next: the eyes of rank 0.

Units come in the order of their commits, behind those whose order is given.  No thread, no wait.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dflash_cache.disk import write_file
from dflash_cache.errors import DFlashError
from dflash_cache.growing import NOBODY_GOES_ON
from dflash_cache.presence import Presence
from dflash_cache.reader import Reader
from dflash_fit.errors import FitError
from dflash_fit.news import Entry

ORDER_FILE = "followed.json"  # in the run folder


class Lookout:
    """Looks at the folder; `order` are all units whose place is known, those to come included.

    It only grows, so that another thread sees a beginning of it whenever it looks.
    """

    def __init__(
        self, reader: Reader, order: Sequence[str], *, patience: float = NOBODY_GOES_ON
    ) -> None:
        self.reader, self.patience = reader, patience
        self.units = {located.unit for located in reader.located}
        self.order, self.count = list(order), 0  # so many of them are told
        self.committed: dict[str, None] = {}  # not told yet, in the order of their commits

    def begin(self) -> None:
        """From now on somebody should be building."""
        self.presence = Presence(Path(self.reader.root))

    def look(self) -> Entry | None:
        """Units that come next, the end of all, or why there will be no more; None: nothing new."""
        try:
            self.committed |= dict.fromkeys(self.reader.refresh())
            who = None if self.reader.sealed else self.presence.look()
        except DFlashError as error:  # damage above all
            return Entry(ended=True, reason=str(error))
        units = self._next()
        if self.reader.sealed and self.count == len(self.units):
            return Entry(units=units, complete=True)
        if units:
            return Entry(units=units)
        if not self.reader.sealed and who is None and self.presence.absence > self.patience:
            return Entry(ended=True, reason=self._nobody_builds())
        return None

    def counted(self) -> str:
        return f"{len(self.reader.records)} of {len(self.units)} units are committed"

    def _next(self) -> tuple[str, ...]:
        begin = self.count
        while self.count < len(self.order) and self.order[self.count] in self.committed:
            del self.committed[self.order[self.count]]
            self.count += 1
        if self.count == len(self.order):
            self.order += self.committed
            self.count = len(self.order)
            self.committed.clear()
        return tuple(self.order[begin : self.count])

    def _nobody_builds(self) -> str:
        return (
            f"{self.reader.root}: {self.counted()} and nobody builds it any more; run `dflash "
            "cache build` again, then the same fit command goes on from here"
        )


def write_order(path: Path, order: Sequence[str]) -> None:
    """Leave the order in a run folder: all of it, or what was there."""
    payload = json.dumps(order, indent=1).encode()
    if not path.is_file() or path.read_bytes() != payload:
        write_file(path, payload)


def read_order(path: Path, reader: Reader) -> list[str]:
    """The units of a run in the order in which it took them: of this cache, each once."""
    wanted = f"want the {ORDER_FILE} of a run with --follow on this cache"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FitError(f"{path}: cannot be read ({error}); {wanted}") from None
    units = {located.unit for located in reader.located}
    if not isinstance(found, list) or not all(isinstance(unit, str) for unit in found):
        raise FitError(f"{path}: not a list of units; {wanted}")
    if strange := Counter(found) - Counter(units):
        raise FitError(
            f"{path}: {reader.root} has no unit {min(strange)}, or it is named twice; {wanted}"
        )
    return found
