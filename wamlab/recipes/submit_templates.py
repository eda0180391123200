"""The files that `wamlab submit` fills in; ``$$`` is a dollar sign of the file itself."""

from string import Template

SLURM = Template(r"""#!/usr/bin/env bash
# Trains on $nodes nodes with $processes processes each. Hand in with sbatch; squeue shows it, scancel ends it.
# Before the time is up, or when the job is pre-empted, Slurm sends SIGUSR1: the run writes a checkpoint and ends, the
# job is queued again and goes on with the same run folder. The folder must lie on a disk that all nodes see.
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
${gpu_line}#SBATCH --time=$time
#SBATCH --signal=B:USR1@$notice_s
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
${more_lines}set -uo pipefail

head=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
port=$$((20000 + SLURM_JOB_ID % 40000))
note=$jobs/run-$$SLURM_JOB_ID  # the run's folder will stand here
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # processes that begin again need a new store (pytorch issue 135712)

srun $python -m torch.distributed.run \
    --nnodes=$nodes --nproc-per-node=$processes --max-restarts=$restarts --monitor-interval=1 \
    --rdzv-backend=c10d --rdzv-id="$$SLURM_JOB_ID" --rdzv-endpoint="$$head:$$port" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=$timeout_s \
    -m wamlab.cli $words --runs $runs --announce "$$note" &
job=$$!

is_preempted=0
trap 'is_preempted=1; kill -USR1 "$$job"' USR1
trap 'kill -TERM "$$job"' TERM  # of scancel: a checkpoint, and an end
status=0
while true; do
    wait "$$job"
    status=$$?
    kill -0 "$$job" 2>/dev/null || break  # a signal ends the waiting too
done

if [ "$$is_preempted" = 1 ] && ! grep -qs '"state": "finished"' "$$(cat "$$note" 2>/dev/null)/status.json"; then
    echo "taken off the machine: queued again"
    scontrol requeue "$$SLURM_JOB_ID"
    exit 75
fi
exit "$$status"
""")

SKYPILOT = Template(r"""# Trains on $nodes nodes with $processes processes each. Hand in with: sky jobs launch FILE
# A managed job is started again elsewhere when its machines are taken away, and then goes on with the run folder, which
# lies in a bucket that all of them mount. It must allow folders to be renamed.
name: $name
num_nodes: $nodes
resources:
  $resources
  use_spot: $spot
workdir: .
file_mounts:
  /wamlab_runs:
    name: wamlab-runs
    mode: MOUNT_CACHED
setup: |
  pip install -e .
run: |
  set -euo pipefail
  runs=/wamlab_runs/$$SKYPILOT_TASK_ID  # the same after a recovery
  mkdir -p "$$runs"
  resume=""
  if compgen -G "$$runs/*/checkpoints/step_*/state.json" > /dev/null; then
    resume="--resume"
    if [ "$$SKYPILOT_NODE_RANK" = 0 ]; then rm -f "$$runs"/*/lock; fi  # of machines that are gone
  fi
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  python -m torch.distributed.run --nnodes=$nodes --nproc-per-node=$processes --max-restarts=$restarts \
    --rdzv-backend=c10d --rdzv-id="$$SKYPILOT_TASK_ID" \
    --rdzv-endpoint="$$(echo "$$SKYPILOT_NODE_IPS" | head -n 1):29400" \
    -m wamlab.cli $words --runs "$$runs" $$resume
""")

RAY = Template(r'''"""Trains on Ray with $nodes x $processes workers. Run it on a machine of the cluster: python FILE

Ray starts the workers again after a failure, up to $restarts times; they go on from the newest checkpoint of the run
folder, which must lie on a disk that all of them see.
"""

import os
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = Path.cwd()  # in which the words below make sense; all machines see it
RUNS = FOLDER / $runs_text / "ray-$name"  # of this job alone
WORDS = $words_list


def train(config):
    """Do what `wamlab train` does in this worker; Ray has set its rank and joined the workers."""
    from ray.train import get_context

    from wamlab.cli import main

    os.chdir(config["folder"])
    words = [*config["words"], "--runs", config["runs"]]
    if list(Path(config["runs"]).glob("*/checkpoints/step_*/state.json")):
        words.append("--resume")
        if get_context().get_world_rank() == 0:
            for lock in Path(config["runs"]).glob("*/lock"):  # of workers that Ray has ended
                lock.unlink(missing_ok=True)
    if status := main(words):
        raise RuntimeError(f"wamlab ended with status {status}")


if __name__ == "__main__":
    RUNS.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={"words": WORDS, "runs": str(RUNS), "folder": str(FOLDER)},
        torch_config=TorchConfig(backend="$backend"),
        scaling_config=ScalingConfig(num_workers=$nodes * $processes, use_gpu=$use_gpu),
        run_config=RunConfig(name="$name", failure_config=FailureConfig(max_failures=$restarts)),
    )
    print(trainer.fit())
''')
