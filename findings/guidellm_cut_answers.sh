#!/usr/bin/env bash
# Guess: a server that gives each of four users 80 tokens a second is reported with 320, whether it sends them
#   one by one or four in a chunk. guidellm has the tokenizer, and the server's answers end with their usage.
# What happens: the time limit cuts the answers that are being written. They have no usage yet, and guidellm
#   counts their chunks as tokens. "Server Throughput Statistics (All Requests)", the table that compares
#   servers, adds them to the finished answers. Nothing warns. The JSON report's words of the cut answers are
#   right. A server with the usage in each chunk is reported right. guidellm asks for that, and vLLM does it,
#   but OpenAI's protocol has the usage at the end.
# Why it matters: drafts put several tokens in a chunk, so the server with drafts is reported too slow, and the
#   one without is not. The longer the answers for the time, the more is lost.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
  "$VENV"/bin/pip install -q guidellm==0.8.1 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOP'
import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PACE, LENGTH, USERS, SECONDS = 80, 400, 4, 9  # tokens a second, tokens an answer; the run's users and limit


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with LENGTH tokens, a word each: `size` of them a chunk, PACE a second."""
    size, usage_in_chunks, written = 1, False, 0

    def log_message(self, *_):
        pass

    def begin(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def do_GET(self):
        self.begin("application/json")
        self.wfile.write(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        start = time.time()
        self.begin("text/event-stream")
        try:
            for end in range(self.size, LENGTH + 1, self.size):
                time.sleep(max(0, start + end / PACE - time.time()))
                text = "".join(f"w{i % 50} " for i in range(end - self.size, end))
                finish = "length" if end == LENGTH else None
                self.send([{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
                          end if self.usage_in_chunks else 0)
                with lock:
                    Server.written += self.size
            self.send([], LENGTH)
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass  # the client has cut the answer

    def send(self, choices, tokens):
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices}
        if tokens:
            chunk["usage"] = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())


def measure(size, usage_in_chunks):
    """guidellm's report, and how many tokens the server wrote."""
    Server.size, Server.usage_in_chunks, Server.written = size, usage_in_chunks, 0
    subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "guidellm"), "run", "--disable-console-interactive",
         "--backend", f"kind=openai_http,target=http://127.0.0.1:{server.server_port},model=m",
         "--profile", f"kind=concurrent,streams=[{USERS}]",
         "--constraint", f"kind=max_duration,seconds={SECONDS}",
         "--tokenizer", "kind=huggingface_auto,model=tokenizer",
         "--data", f"kind=synthetic_text,prompt_tokens=10,output_tokens={LENGTH}",
         "--output", "kind=json,path=report.json", "--output", "kind=console"],
        check=True, stdout=sys.stderr)
    with open("report.json") as file:
        return json.load(file)["benchmarks"][0], Server.written


words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i + 1 for i in range(50)}}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained("tokenizer")
lock = threading.Lock()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"guidellm {importlib.metadata.version('guidellm')}, {SECONDS} s, {USERS} users; a server that writes {PACE} "
      f"tokens a second to each, a word a token, answers of {LENGTH}\ntokens a chunk | usage | the server wrote, "
      "tokens/s | reported | tokens of finished answers, reported; their words | of cut answers; their words")
right = True
for size, usage_in_chunks in ((1, False), (2, False), (4, False), (4, True)):
    report, written = measure(size, usage_in_chunks)
    true, metrics = written / report["duration"], report["metrics"]
    reported = metrics["output_tokens_per_second"]["total"]["mean"]
    done, cut = ([round(metrics[name][kind]["total_sum"]) if name else
                  round(metrics["text"]["words"]["output"][kind]["total_sum"])
                  for name in ("output_token_count", "")] for kind in ("successful", "incomplete"))
    print(size, "in each chunk" if usage_in_chunks else "at the end", f"{true:.0f}", f"{reported:.0f}",
          "{}; {}".format(*done), "{}; {}".format(*cut), sep=" | ")
    right &= done[0] == done[1] > 0 and cut[1] > 600
    if size == 1 or usage_in_chunks:
        right &= cut[0] == cut[1] and abs(reported / true - 1) < 0.05
    else:
        right &= cut[0] * size == cut[1] and reported < true * (0.9 if size == 2 else 0.8)
    right &= "usage" not in str(report["warnings"])
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
  "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
