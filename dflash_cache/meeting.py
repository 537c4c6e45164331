"""The `torch.distributed` store where the processes of one job meet."""

import datetime

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dflash_cache.errors import DFlashError
from dflash_cache.ranks import Meeting

CONNECT = datetime.timedelta(seconds=300)
STORE_IS_GONE = (distributed.DistNetworkError, distributed.DistStoreError)


def open_store(meeting: Meeting, *, hosts: bool) -> TCPStore:
    """The store; with `hosts`, this process keeps it for the others as long as the object lives.

    Port 0 is a free one: `store.port` says which.
    """
    try:
        return TCPStore(
            meeting.host,
            meeting.port,
            is_master=hosts,
            wait_for_workers=False,
            timeout=CONNECT,
        )
    except distributed.DistError as error:
        what = "cannot be opened" if hosts else "nobody answers"
        raise DFlashError(
            f"{meeting.host}:{meeting.port}: {what} ({first_line(error)}); MASTER_ADDR and "
            "MASTER_PORT have to be the name of the machine of rank 0 and a free port there, "
            "the same for all"
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
