"""Count what a round asks of a GPU, on the device of pretend.py: results/launches.json.

    python results/tools/launches.py        # takes minutes; prints the table

A fast GPU computes a small target's operators in less time than the CPU needs to launch
them, so their number decides how long a round takes. A copy between the two makes the
CPU wait until the GPU has finished what was launched before. Attention counts as one
operator, as which a GPU runs it.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tools")]

import pretend  # noqa: E402  # before autograd first runs
import tables  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tqdm import tqdm  # noqa: E402

import common  # noqa: E402
from support import cli, default_target  # noqa: E402
from support.measuring import arms, prompts, report  # noqa: E402
from support.training import data  # noqa: E402

COUNTED = ("rounds", "tokens", "launches", "drafting", "to_host", "to_device")
METHODS = ("glide", "cape", "cape:cpu", "specdecpp", "falcon", "ctc_drafter")
PROMPTS = 2
ROUNDS = 20  # of each prompt, after the first one


def count_rounds(decoding, drafts) -> Counter:
    """What the rounds after the first one ask of the device.

    The first one is left out, because its draft reads the whole prompt.

    drafts: the generator of a method, for this `decoding`.
    Returns sums of "rounds", "tokens", "launches", "drafting" (the launches of drafts),
    "to_host" and "to_device".
    """
    decoding.verify(next(drafts))
    sums = Counter()
    while sums["rounds"] < ROUNDS and not decoding.done:
        length = decoding.ids.shape[1]
        before = pretend.counts.copy()
        draft = next(drafts)
        sums["drafting"] += pretend.counts["launches"] - before["launches"]
        decoding.verify(draft)
        sums += pretend.counts - before
        sums["tokens"] += decoding.ids.shape[1] - length
        sums["rounds"] += 1
    return sums


@torch.no_grad()
def measure() -> dict:
    """Let all methods decode greedily, each with its shipped drafter."""
    paths = sorted((ROOT / "prompts").glob("*.jsonl"))
    asked = [prompt["turns"][:1] for prompt in data.read_prompts(paths, PROMPTS)]
    result = {
        "target": default_target.NAME,
        "commit": report.commit(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompts": PROMPTS,
        "sums": {},
    }
    with pretend.gpu():
        target, tokenizer = common.load_target(device="pretend")
        plain = arms.Arm("plain", target, arms.plain_drafts)
        for arm in tqdm([plain, *arms.make_arms(METHODS, target)], disable=None):
            total = Counter()
            for messages in asked:
                inputs = prompts.encode(tokenizer, messages, target.device)
                options = {"max_new_tokens": 256, "do_sample": False}
                decoding = common.start(target, **inputs, **options)
                total += count_rounds(decoding, arm.drafts(decoding))
            result["sums"][arm.name] = {what: total[what] for what in COUNTED}
    return result


def main() -> None:
    about = __doc__.partition("\n")[0]
    argparse.ArgumentParser(description=about).parse_args()
    report.write_result(measure(), str(ROOT / "results" / "launches.json"))
    print(tables.launches("launches.json"))


if __name__ == "__main__":
    cli.run(main)
