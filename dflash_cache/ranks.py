"""Which of many processes this one is, where torchrun or srun started several of us.

Pure: the environment goes in.  Source of the names: torch.distributed.run (torchrun) and the
output environment variables of Slurm's srun.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_cache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the processes of a build find each other: a `torch.distributed` store."""

    host: str
    port: int
    prefix: str  # of all keys; a restarted run must not find those of the one before


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of several that belong to one build."""

    number: int
    world: int
    local: int  # its number on this machine
    meeting: Meeting
    hosts: bool  # whether rank 0 makes the store, or the launcher has it
    own_gpus: int  # so many were asked for each process; 0: for all together

    @property
    def first(self) -> bool:
        return self.number == 0


def find_rank(environment: Mapping[str, str]) -> Rank | None:
    """The rank that a launcher gave to this process; None where it was started alone."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), SLURM):
        number, world, local = (_number(environment, name) for name in names)
        if number is None or world is None or local is None or world == 1:
            continue
        by_torchrun = names is not SLURM
        launcher_has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Rank(
            number=number,
            world=world,
            local=local,
            meeting=_meeting(environment, world),
            hosts=number == 0 and not (by_torchrun and launcher_has_store),
            own_gpus=0 if by_torchrun else _gpus_per_task(environment),
        )
    return None


SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def _gpus_per_task(environment: Mapping[str, str]) -> int:
    """GPUs of each task of srun: `2`, `a100:2`, or among others as in `cpu=4,gres/gpu:a100=2`."""
    by_kind = environment.get("SLURM_TRES_PER_TASK", "").split(",")
    found = environment.get("SLURM_GPUS_PER_TASK") or ",".join(w for w in by_kind if "gpu" in w)
    return sum(map(int, re.findall(r"(?:^|[,:=])([0-9]+)(?=,|$)", found)))


def _number(environment: Mapping[str, str], name: str) -> int | None:
    found = environment.get(name, "")
    return int(found) if found.isdecimal() else None


def _meeting(environment: Mapping[str, str], world: int) -> Meeting:
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    if not host or port is None:
        raise ConfigError(
            f"this is one of {world} processes, and MASTER_ADDR and MASTER_PORT do not say where "
            "they meet: set them to the name of the first node and a free port there, the same "
            "for all. To build with one process, unset SLURM_PROCID"
        )
    run = environment.get("TORCHELASTIC_RUN_ID") or environment.get("SLURM_JOB_ID", "")
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    step = environment.get("SLURM_STEP_ID", "0")
    return Meeting(host=host, port=port, prefix=f"dflash/{run}/{step}/{restarts}")
