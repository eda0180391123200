"""Commands about files that others wrote: robots and published weights; free of torch until one runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gaierror
from typing import Literal

from tyro.conf import Positional

from wamlab.errors import InputError


def show_robot(file: Positional[str] = "", data: Path | None = None, patch_px: int = 16) -> None:
    """Check a robot file, alone or against a dataset; without a file list the robots that come with the library.

    Args:
        file: a TOML file, or the name of a robot that comes with the library
        data: dataset to hold it against
        patch_px: side of what becomes one token: 32 with the Wan 2.2 autoencoder, 16 with 2.1 and the embedded codec
    """
    from wamlab.data.lerobot import open_dataset
    from wamlab.data.robot_files import check_robot_file, list_robots

    if patch_px < 1:
        raise InputError(f"--patch-px is {patch_px}: give at least 1")
    if not file:
        print("\n".join(list_robots()))
        return
    found = check_robot_file(file, None if data is None else open_dataset(data), patch_px=patch_px)
    robot, window = found.robot, found.window
    print(f"{found.path}{'' if data is None else f' fits {data}'}")
    print(f"  {', '.join(robot.cameras)} as {robot.layout}: {robot.canvas_height_px} x {robot.canvas_width_px} px")
    print(f"  {window.max_blocks} blocks of {window.frames_per_block} frames, {window.actions_per_block} actions")
    print(f"  a window needs {window.num_rows} rows")


def inspect_weights(path: Positional[Path]) -> None:
    """Say what a published checkpoint holds and which network it fits, from its headers alone.

    Args:
        path: a .safetensors file, or a folder of them
    """
    from wamlab.model.weights import describe, fingerprint

    print(describe(path))
    print(f"  fingerprint of the network: {fingerprint(path)}")


def convert_weights(
    source: Positional[Path],
    target: Positional[Path],
    layout: Literal["wamlab", "wan", "diffusers", "dreamzero"],
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same",
) -> None:
    """Write a checkpoint in another layout or number type, one tensor in memory at a time.

    Args:
        source: a .safetensors file, or a folder of them
        target: new .safetensors file, or new folder of shards
        layout: names of the tensors
        dtype: number type; "same" copies bit for bit
    """
    import torch

    from wamlab.model.weights import convert

    kind = None if dtype == "same" else getattr(torch, dtype)
    done = convert(source, target, layout=layout, dtype=kind)
    print(f"wrote {done.num_tensors} tensors, {done.num_bytes / 1e9:.3f} GB, as {done.layout}: {done.target}")
    if done.left_out:
        print(f"left out, as this layout has no place for them: {', '.join(done.left_out)}")


def plan_training(
    recipe: Positional[str] = "",
    devices: str = "8xH100",
    method: str = "",
    micro_batch: int | None = None,
    backtest: bool = False,
    json: bool = False,
) -> None:
    """Predict a recipe's step on devices that are not here: time, memory and what bounds it, for each method.

    Args:
        recipe: its name
        devices: number and kind, such as 8xH100, 4xH200 or L40S
        method: one of official, fsdp2-base, rlinf, wamlab-eager, wamlab, wamlab-cached; all of them if not given
        micro_batch: samples a device and step, in place of the recipe's
        backtest: hold the predictor against published steps and a step of this machine's CPU; takes 5 s
        json: print the figures as one line of JSON
    """
    from json import dumps

    from wamlab.recipes.backtest import backtest_figures, backtest_table, expected_error
    from wamlab.recipes.backtest_cpu import backtest_cpu
    from wamlab.recipes.methods import find_method
    from wamlab.recipes.plan import plan, plan_table
    from wamlab.recipes.published import RECIPES, find_recipe
    from wamlab.speed.peaks import parse_devices

    if not recipe and not backtest:
        raise InputError(f"name a recipe to plan, one of {', '.join(RECIPES)}: wamlab plan droid_14b_8gpu")
    num_devices, peak = parse_devices(devices)
    chosen = (find_method(method),) if method else ()
    found = plan(find_recipe(recipe), num_devices, peak, chosen, micro_batch=micro_batch) if recipe else []
    error = expected_error()
    on_cpu = backtest_cpu() if backtest else None
    if json:
        figures = {"plan": [prediction.to_dict() for prediction in found], "expected_error": error}
        print(dumps(figures | ({"backtest": backtest_figures(), "cpu_error": on_cpu.error} if on_cpu else {})))
        return
    if found:
        print(plan_table(found))
        print(f"\nRLinf's benchmark: the four of six steps that no constant was fitted to are met within {error:.0%}")
        print("(--backtest lists them). Compiled blocks, memory and other devices than the H100 are unchecked.")
    if on_cpu:
        print(f"\n{backtest_table()}\n{on_cpu}")


def serve(
    name: Positional[str] = "",
    root: Path = Path("runs"),
    host: str = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 32,
    deadline_ms: float = 10.0,
    reply: Literal["dict", "array"] = "dict",
    memory_gib: float = 2.0,
    idle_s: float = 600.0,
    seed: int = 0,
    sampler_steps: int | None = None,
) -> None:
    """Serve a run's policy to openpi, RoboArena, DreamZero and MolmoSpaces clients until Ctrl-C.

    Args:
        name: of the run, its start or a part of it; without one, the newest run
        root: folder of the runs
        host: address to listen on; 0.0.0.0 opens it to the network, without any password
        port: to listen on; 0 takes a free one
        max_batch: sessions planned in one call; 1 gives each the bits it would get alone
        deadline_ms: that a request waits for others
        reply: form of RoboArena's answers; array for DreamZero's own test client
        memory_gib: for what is kept of sessions; the least recently used are forgotten beyond it
        idle_s: after which a silent connection is closed and a session forgotten
        seed: of the sampling noise
        sampler_steps: network evaluations per chunk; as the recipe says if not given
    """
    check_numbers(0, seed=seed)
    check_numbers(1, sampler_steps=1 if sampler_steps is None else sampler_steps)
    try:
        from wamlab.serve.server import PolicyServer, ServeConfig, serve_forever
    except ModuleNotFoundError as error:
        raise InputError(f"serving needs the package {error.name}: pip install 'wamlab[serve]'") from None
    from wamlab.lab.run import find_run
    from wamlab.recipes.serve import SessionPolicy, load_session_policy, warm_up

    config = ServeConfig(host, port, max_batch, deadline_ms, reply, memory_gib=memory_gib, idle_s=idle_s)
    run = find_run(root, name)

    def load() -> SessionPolicy:
        policy = load_session_policy(run, seed=seed, num_sampler_steps=sampler_steps)
        warm_up(policy)
        return policy

    executor = ThreadPoolExecutor(1, thread_name_prefix="policy")
    policy = executor.submit(load).result()
    try:
        serve_forever(
            PolicyServer(policy, policy.contract, config, executor=executor),
            lambda address: print(f"{run.name} at {address}\n{policy.history_sentence}", flush=True),
        )
    except gaierror as error:
        raise InputError(f"--host {host} is no address of this machine ({error.strerror}): give 127.0.0.1") from error


def check_numbers(least: int | float, **numbers: int | float) -> None:
    """Refuse the first option below ``least`` or not finite."""
    for name, number in numbers.items():
        if not least <= number < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} is {number}: give at least {least:g}")
