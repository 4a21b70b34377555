"""Count what a round asks of a GPU, on the device of pretend.py: results/launches.json.

    python results/tools/launches.py        # takes minutes; prints the table
    python results/tools/launches.py --device cuda --json FILE      # by a real GPU

A fast GPU computes a small target's operators in less time than the CPU needs to launch
them, so their number decides how long a round takes. A copy between the two makes the
CPU wait until the GPU has finished what was launched before. Attention counts as one
operator, as which a GPU runs it. On a real GPU torch's profiler counts what ran there;
on some it sees nothing, and then no file is written.
"""

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tools")]

import pretend  # noqa: E402  # before autograd first runs
import tables  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from tqdm import tqdm  # noqa: E402

import common  # noqa: E402
from support import cli, default_target  # noqa: E402
from support.measuring import arms, prompts, report  # noqa: E402
from support.training import data  # noqa: E402

COUNTED = ("rounds", "tokens", "launches", "drafting", "to_host", "to_device")
METHODS = ("glide", "cape", "cape:cpu", "specdecpp", "falcon", "ctc_drafter")
PROMPTS = 2
ROUNDS = 20  # of each prompt, after the first one, by default


def pretended(work) -> tuple:
    """What a function returns, and what it asked of the device of pretend.py."""
    before = pretend.counts.copy()
    return work(), pretend.counts - before


def profiled(work) -> tuple:
    """What a function returns, and what it made a GPU do."""
    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[kind]) as watched:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return result, counted(watched.events())


def counted(events) -> Counter:
    """The kernels and the copies among the profiler's events."""
    counts = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA:
            kinds = {"Memcpy DtoH": "to_host", "Memcpy HtoD": "to_device"}
            kind = kinds.get(event.name[:11], "launches")
            # A range that somebody has named spans its kernels, and is none itself.
            counts[kind] += not getattr(event, "is_user_annotation", False)
    return counts


def count_rounds(decoding, drafts, watch, rounds: int) -> Counter:
    """What the rounds after the first one ask of the device.

    The first one is left out, because its draft reads the whole prompt.

    drafts: the generator of a method, for this `decoding`.
    watch: `pretended` or `profiled`.
    Returns sums of "rounds", "tokens", "launches", "drafting" (the launches of drafts),
    "to_host" and "to_device".
    """
    decoding.verify(next(drafts))
    sums = Counter()
    while sums["rounds"] < rounds and not decoding.done:
        length = decoding.ids.shape[1]
        draft, drafting = watch(lambda: next(drafts))
        _, verifying = watch(lambda: decoding.verify(draft))  # noqa: B023
        sums += drafting + verifying
        sums["drafting"] += drafting["launches"]
        sums["tokens"] += decoding.ids.shape[1] - length
        sums["rounds"] += 1
    return sums


@torch.no_grad()
def measure(device: str, count: int, rounds: int) -> dict:
    """Let all methods decode greedily, each with its shipped drafter.

    device: "pretend", or one that is there.
    count: how many prompts.
    rounds: of each.
    """
    paths = sorted((ROOT / "prompts").glob("*.jsonl"))
    asked = [prompt["turns"][:1] for prompt in data.read_prompts(paths, count)]
    result = {
        "target": default_target.NAME,
        "commit": report.commit(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompts": count,
        "sums": {},
    }
    dtype = torch.float32
    if device != "pretend":
        result["device"] = device
    if device.startswith("cuda"):
        result["device"] = torch.cuda.get_device_name(device)
        dtype = torch.bfloat16  # as it is used there; attention has other kernels
    watch = pretended if device == "pretend" else profiled
    with pretend.gpu() if device == "pretend" else contextlib.nullcontext():
        target, tokenizer = common.load_target(dtype=dtype, device=device)
        plain = arms.Arm("plain", target, arms.plain_drafts)
        for arm in tqdm([plain, *arms.make_arms(METHODS, target)], disable=None):
            total = Counter()
            for messages in asked:
                inputs = prompts.encode(tokenizer, messages, target.device)
                options = {"max_new_tokens": 256, "do_sample": False}
                decoding = common.start(target, **inputs, **options)
                drafts = arm.drafts(decoding)
                total += count_rounds(decoding, drafts, watch, rounds)
            if not total["launches"]:  # plain decoding comes first
                raise common.UserError(
                    f"torch's profiler saw no kernel on {device} while {arm.name} "
                    "decoded: count without --device, on the pretended one"
                )
            result["sums"][arm.name] = {what: total[what] for what in COUNTED}
    return result


def main() -> None:
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", default="pretend", help="or cuda")
    parser.add_argument("--num-prompts", type=int, default=PROMPTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of a prompt")
    file = ROOT / "results" / "launches.json"
    parser.add_argument("--json", default=str(file), help="default: %(default)s")
    args = parser.parse_args()
    result = measure(args.device, args.num_prompts, args.rounds)
    report.write_result(result, args.json)
    for name, sums in result["sums"].items():
        print(name, sums)
    if args.json == str(file):
        print(tables.launches("launches.json"))


if __name__ == "__main__":
    cli.run(main)
