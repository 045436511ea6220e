"""What actually runs: kernels, network, optimizer, versions and devices, described once at a run's start."""

from __future__ import annotations

import json
from typing import Any

from kernels import apex, backend
from trainer.console import Tell, warn
from trainer.engine.engine import Engine
from trainer.monitor.devices import device_facts
from trainer.ranks.network import falls_to_tcp, spoken
from trainer.ranks.world import World, gather_texts, nccl_said
from trainer.run.config import Config, fingerprint, to_tree


def describe(config: Config, engine: Engine[Any], world: World, tell: Tell) -> dict[str, str]:
    """Return what runs, by name, and report the kernels, and a network that is slower than it should be."""
    chosen, heard = backend.resolve(world.device.type), nccl_said()
    if warning := falls_to_tcp(heard):
        warn(warning, tell)
    tell(f"kernels: {chosen.name} ({chosen.reason})")
    return {
        "run": config.run.name,
        "config": fingerprint(to_tree(config)),
        "ranks": str(world.size),
        "device": world.device.type,
        "network": " over ".join(filter(None, ("gloo" if world.device.type == "cpu" else "nccl", spoken(heard)))),
        "zero_stage": str(config.engine.zero_stage),
        "optimizer": config.optimizer.name,
        "optimizer_implementation": config.optimizer.implementation,
        "offload": "optimizer" if config.engine.offload_optimizer else "none",
        "kernels": chosen.name,
        "apex": apex.describe(used=config.optimizer.implementation == "apex"),
        "parameters": str(engine.parameters),
        **engine.versions,
    }


def devices(world: World) -> list[dict[str, str]]:
    """Return every rank's device. A collective."""
    return [json.loads(text) for text in gather_texts(json.dumps(device_facts(world.device)), world)]
