#!/usr/bin/env bash
# Train on a Slurm cluster: sbatch [options of sbatch] scripts/slurm.sh CONFIG [--section.key value ...]
#
# One torchrun per node, one rank per GPU. Started from the folder of the repository; what the nodes share must hold it
# and the run folder (docs/multinode.md). Options on sbatch's command line win over those here.
#
# Five minutes before the time limit all ranks finish their step, save and end, and the job is queued again: it goes on
# from that checkpoint. From the environment of sbatch:
#   NPROC         ranks on each node (default: its GPUs, else 1)
#   MIN_NODES     go on with so few nodes when others are lost (default: all are needed)
#   MAX_RESTARTS  how often torchrun starts the ranks again after a failure (default 3)
#
#SBATCH --job-name=titanlike
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u

if [ $# -lt 1 ]; then
  echo "usage: sbatch [options of sbatch] scripts/slurm.sh CONFIG [--section.key value ...]" >&2
  exit 2
fi
if [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "error: this is not a Slurm job: start it with sbatch scripts/slurm.sh $*" >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ -x .venv/bin/torchrun ]; then
  PATH="$PWD/.venv/bin:$PATH"
fi

nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
nproc=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RENDEZVOUS="$head:$((20000 + SLURM_JOB_ID % 20000))"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or a node that joins later is never told where the others meet
if [ -n "${SLURM_CPUS_ON_NODE:-}" ]; then
  share=$((SLURM_CPUS_ON_NODE / nproc))
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}"
fi

# USR1, which comes before the time limit, goes to the ranks; torchrun has no use for it, and ignores it as its parent
# does. TERM comes with scancel or preemption: Slurm gives it to all processes of the job itself, and the ranks save too.
again=no
trap 'again=yes; echo "the time limit is near: saving, then queued again"; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'echo "told to end"' TERM

# What each node runs. --local-addr: the name by which Slurm knows a node is one that the other nodes can find.
# shellcheck disable=SC2016  # the variables are those of the node
node='trap "" USR1
here="${SLURMD_NODENAME:-$(hostname)}"
exec torchrun --nnodes "$1" --nproc-per-node "$2" --max-restarts "$3" \
  --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d \
  --rdzv-endpoint "$RENDEZVOUS" --rdzv-conf "is_host=$([ "$SLURM_NODEID" = 0 ] && echo 1 || echo 0)" \
  --local-addr "$here" scripts/train.py --config "${@:4}"'

# A node that is lost ends the step, unless fewer nodes will do.
end_step=1
if [ -n "${MIN_NODES:-}" ]; then
  end_step=0
fi
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit="$end_step" \
  bash -c "$node" node "${MIN_NODES:-$nodes}:$nodes" "$nproc" "${MAX_RESTARTS:-3}" "$@" &
step=$!

# A signal ends wait before the step has ended, and its trap has run by then.
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

if [ "$again" = yes ] && [ "$code" = 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
