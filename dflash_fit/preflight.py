"""What is told of a run before it begins."""

import sys
import time

import torch
from tqdm import tqdm

from dflash_cache.devices import slow_bfloat16
from dflash_cache.reader import CacheReader, Reader
from dflash_fit.backends import chosen
from dflash_fit.batch import Batch
from dflash_fit.course import Position
from dflash_fit.estimate import Estimate, estimate, speed_of, tell, too_large
from dflash_fit.prepare import Outline, precision_of_wire, shape_for
from dflash_fit.work import Work

START = Position(epoch=0, index=0)


def preflight(plan: Outline) -> Estimate:
    """What the run takes; the device and, where the cache is complete, the disk are timed."""
    device, precision = plan.world.device, plan.config.precision
    speed = speed_of(device, precision=precision)
    return estimate(work_of(plan), flops_per_s=speed, read_bytes_per_s=reading_speed(plan))


def tell_before(plan: Outline) -> None:
    """Print it, and warn where a device has too little memory or is slow in what it is to do."""
    found = preflight(plan)
    tqdm.write(tell(found), file=sys.stderr)
    warning = None
    if plan.world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(plan.world.device)
        warning = too_large(found, free)
    elif plan.config.precision == "bf16":
        warning = slow_bfloat16(instead="--precision fp32")
    if warning is not None:
        tqdm.write(f"Warning: {warning}", file=sys.stderr)


def work_of(plan: Outline) -> Work:
    """The run in numbers; a run that measures its anchors has to have done so."""
    config, reader, device = plan.config, plan.reader, plan.world.device
    assert config.anchors != "auto", config
    packs = plan.plan.length(0)
    tokens = sum(reader.lengths[document] for document in plan.training)
    return Work(
        drafter=plan.drafter,
        shape=shape_for(config, plan.drafter, reader),
        steps=plan.steps,
        packs_per_step=plan.packs,
        passes_per_pack=config.passes_per_pack,
        ranks=plan.world.size,
        packs_per_epoch=packs,
        tokens_per_epoch=tokens,
        anchors_per_pack=min(config.anchors, supervised_share(reader) * tokens / packs),
        state_bytes_per_token=reader.state_bytes_per_token,
        anchor_microbatch=config.microbatch(device.type),
        loss_chunk=config.loss_chunk,
        precision=config.precision,
        reduce=precision_of_wire(config),
        sharded=config.shard_optimizer and plan.world.size > 1,
        captured=plan.captured,
        attention=chosen(config.attention, device),
        tied=reader.identity.target_spec.tied_head,
        device_type=device.type,
    )


def supervised_share(reader: Reader) -> float:
    """Of the tokens; of what is committed, and all of them before the first unit."""
    records = reader.records.values()
    tokens = sum(sum(record.lengths) for record in records)
    return sum(sum(record.supervised) for record in records) / tokens if tokens else 1.0


def reading_speed(plan: Outline) -> float | None:
    """Bytes a second with which a pack is read; None while the cache is still being built."""
    if not isinstance(plan.reader, CacheReader):
        return None
    source = plan.source(plan.config, course=plan.plan)
    host = Batch.empty(source.shape, device=torch.device("cpu"))
    began = time.perf_counter()
    source.fill(host, START, 0)
    return source.stored_bytes(START, 0) / (time.perf_counter() - began)
