"""What ranks leave each other in the store of their world: never a collective, never a call that
waits, so that it may go on behind the back of training.
"""

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any, Self
from uuid import uuid4

from torch.distributed import HashStore  # type: ignore[attr-defined]

from dflash_cache.errors import DFlashError
from dflash_fit.errors import FitError
from dflash_fit.world import World, own_client


class Notes:
    """A board of JSON values under keys that no other board has.

    All ranks make one together.  Raises `RuntimeError` where the store is gone.
    """

    def __init__(self, world: World) -> None:
        name = world.share(f"notes/{uuid4().hex}")
        # One's own client: others may wait in theirs, and one object serves one call at a time.
        self.store = own_client(HashStore() if world.store is None else world.store, name)

    def leave(self, key: str, value: Any) -> None:
        """Put a value there, unless there is one already."""
        self.store.compare_set(key, "", json.dumps(value))

    def find(self, key: str) -> Any:
        """The value, None where there is none yet."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank could not do its part, for the others."""

    rank: int
    host: str
    number: int | None  # errno of what the machine refused
    text: str

    @classmethod
    def of(cls, error: BaseException, *, rank: int) -> Self:
        told = str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
        machine = error if isinstance(error, OSError) and error.errno else None
        return cls(
            rank=rank,
            host=socket.gethostname(),
            number=machine.errno if machine else None,
            text=(machine.strerror or "") if machine else told,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def error(self, doing: str) -> Exception:
        """What another rank raises; a full disk stays one."""
        if self.number is not None:
            return OSError(self.number, f"{self.text} (rank {self.rank} on {self.host}, {doing})")
        return FitError(f"rank {self.rank} on {self.host} failed {doing}: {self.text}")
