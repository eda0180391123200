"""What the notebooks of the browser tests run."""

NUM_STEPS = 2000

# A run that does what its folder is asked for, as the trainer does, without the seconds that torch takes.
WRITER = """
import random, sys, time
from wamlab.errors import Stopped
from wamlab.lab.control import read_wish
from wamlab.lab.run import create_run
rng = random.Random(0)
with create_run(sys.argv[1], "live", {"train": {"num_steps": NUM_STEPS}}) as run:
    for step in range(1, NUM_STEPS + 1):
        action = 0.3 / step**0.5 * (1 + 0.1 * rng.random())
        split_s = {"data": 0.002, "encode": 0.004, "forward": 0.012, "backward": 0.024, "optimizer": 0.003}
        run.log({"step": step, "loss": 2 * action, "video_loss": action, "action_loss": action,
                 "samples_per_s": 150 + rng.random(), "step_s": 0.05 + 0.05 * rng.random() ** 4, "split_s": split_s,
                 "mfu": 0.3 + 0.02 * rng.random(), "memory_gib": 1.0, "gradient_norm": 1 + rng.random()})
        if step % 50 == 0:
            run.log_evaluation({"step": step, "held_out_loss": 2.5 * action, "action_error": action})
        time.sleep(0.05)
        while (wish := read_wish(run.folder)) == "pause":
            run.mark(is_paused=True)
            time.sleep(0.05)
        run.mark(is_paused=False)
        if wish == "stop":
            raise SystemExit(0)
""".replace("NUM_STEPS", str(NUM_STEPS))

PANELS = [
    """
import numpy as np
from wamlab.lab.clip_viewer import ClipViewer
rng = np.random.default_rng(0)
y, x = np.mgrid[:64, :64]
def film(shift, noise):
    frames = []
    for frame in range(24):
        ball = (x - 10 - 1.8 * frame - shift) ** 2 + (y - 32) ** 2 < 60
        picture = np.where(ball[..., None], (213, 94, 0), (40, 60, 80)) + noise * rng.normal(size=(64, 64, 1))
        frames.append(np.clip(picture, 0, 255))
    return np.array(frames).astype(np.uint8)
ticks = np.linspace(0, 6, 48)[:, None] + np.arange(4)
viewer = ClipViewer({"wrist": film(0, 3), "left": film(8, 3)}, {"wrist": film(1, 12), "left": film(9, 12)},
                    actions=np.sin(ticks), predicted_actions=np.sin(ticks) + 0.1 * rng.normal(size=ticks.shape),
                    action_names=["x", "y", "z", "gripper opening"], fps=10, title="Episode 7")
viewer
""",
    """
from wamlab.lab.tuner_front import TunerFront
choices = []
for full in range(0, 31, 3):
    for micro in (1, 2):
        choices.append({"label": f"{full} of 30 blocks recomputed, micro-batch {micro}", "micro_batch": micro,
                        "num_micro_batches": 8 // micro, "memory_gib": 20 + 1.1 * (30 - full) * micro,
                        "step_s": (0.9 + 0.012 * full) * (1.15 if micro == 1 else 1.0),
                        "runs": [("full", full), ("keep", 30 - full)] if full else [("keep", 30)],
                        "command": f'wamlab train droid_14b --speed.recompute "{full} full, {30 - full} keep"'})
front = TunerFront(choices, limit_gib=70)
front
""",
    """
from wamlab.lab.rollout_panel import RolloutPanel
bars, free = [], [[0.0, 0.0] for _ in range(4)]
for episode, chunks in enumerate(rng.integers(4, 40, 48)):
    worker = int(np.argmin([min(slots) for slots in free]))
    slot = int(np.argmin(free[worker]))
    start = free[worker][slot]
    free[worker][slot] = start + 0.5 * chunks
    bars.append({"worker": worker, "group": episode // 8, "member": episode % 8, "start_s": start,
                 "end_s": start + 0.5 * chunks, "chunks": int(chunks)})
rollouts = RolloutPanel(bars)
rollouts
""",
    """
from wamlab.lab.clip_viewer import encode_frame
from wamlab.lab.dataset_browser import DatasetBrowser
tasks = ["put the red cube into the bowl", "open the drawer", "reach for the <b>blue</b> ball", "fold the towel"]
episodes = [{"episode": i, "task": tasks[i % 4], "seconds": 4 + float(rng.gamma(4)), "frames": 100 + i,
             "is_success": bool(i % 3)} for i in range(60)]
browser = DatasetBrowser(episodes, lambda i: [encode_frame(film(i % 20, 3)[k]) for k in (0, 8, 16)])
browser
""",
    "print('item', viewer.num_frames, front.chosen, rollouts.chosen, browser.chosen)",
]

# Two short runs that differ in one field, side by side.
COMPARISON = """
from wamlab.lab.run import create_run
from wamlab.lab.comparison import Comparison
from wamlab.lab.comparison_panel import ComparisonPanel
runs = []
for name, rate in (("slow", 1e-4), ("fast", 1e-3)):
    run = create_run("compared", name, {"train": {"num_steps": 300, "learning_rate": rate}})
    for step in range(1, 301):
        run.log({"step": step, "loss": (1 + 200 * rate) / step ** (0.3 + 100 * rate), "step_s": 0.1, "mfu": 0.3,
                 "samples_per_s": 10.0 + rate, "memory_gib": 1.0, "gradient_norm": 1 / step})
    run.finish()
    runs.append(run)
panel = ComparisonPanel(Comparison(tuple(runs)), verdict="not enough evidence: one pair of seeds")
panel
"""

# A run of real training in a process of its own.
RUN_PANEL = """
from wamlab.cli import main
from wamlab.lab.run_panel import RunPanel
assert main("data make recorded --families reach --episodes 6 --size-px 32 32".split()) == 0
changes = {
    "data.root": "recorded", "robot.view_height_px": 32, "robot.view_width_px": 32, "model.layers": 2, "model.dim": 48,
    "model.ffn_dim": 96, "evaluation.every": 100000, "evaluation.num_clips": 2, "evaluation.noise_levels": [0.5],
    "checkpoint_every": 5000, "train.num_steps": 20000, "train.batch_size": 2, "sampler.num_steps": 1,
}
panel = RunPanel("tiny", changes, runs="trained", environment={"OMP_NUM_THREADS": "1"})
panel
"""

# Training in the kernel itself, in a cell that holds it up; an interrupt ends it as the trainer's own loop does.
IN_THE_KERNEL = """
import time
from wamlab.lab.control import Wishes
from wamlab.lab.run import create_run
from wamlab.lab.watch import watch
run = create_run("inside", "inside", {"train": {"num_steps": 100000}})
watching = watch(run)
wishes, step = Wishes(run.folder), 0
with run, wishes.heeded():
    while wishes.read() != "stop" and step < 4000:
        step += 1
        run.log({"step": step, "loss": 1 / step, "step_s": 0.02, "samples_per_s": 50.0})
        time.sleep(0.02)
    run.finish("stopped")
print("ended", "after", step, "steps")
"""
