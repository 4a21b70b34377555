"""The mutants of mutation.py, {file: [(old, new, what is wrong)]}.

Below the name of a file (#), a line says what is wrong, and a diff follows: the old
text (-) and the new one (+, or after -->). The old text occurs once in the file; a
second line of it begins with - as well. No mutant leaves the program right: a token
that was rejected, for instance, has no probability left, whatever is done about it.
"""

import re

TEXT = r"""
# common.py
a node sees the root and itself only
- sees[node + 1] |= sees[parent + 1] --> sees[node + 1] |= sees[0]
positions count rows, not levels
- positions = prefix + torch.tensor([0, *draft.depths()])
+ positions = prefix + torch.arange(len(draft.tokens) + 1)
a window is one position too long
- else sees & (query - key < window) --> else sees & (query - key <= window)
a target that has changed is not tried again
- if _TRIED.get(target) != state: --> if target not in _TRIED:
a trial writes in the target's own config
- value = copy.deepcopy(value, memo) --> pass
a trial writes in the tables of the target's rotary embedding
- twin._buffers[name] = copy.deepcopy(twin._buffers[name]) --> pass
a target is tried once for all that wraps it
- _check_parts(target, kernel, adapters)
+ _TRIED.get(target) == state or _check_parts(target, kernel, adapters)
a trial takes a fault for rounding
- tolerance = 0.15 if half else 2e-3 --> tolerance = 2.0
in a trial the second round is not compared
- torch.cat([one[kept], two[:3:2]]) --> torch.cat([one[kept], right[5:]])
the state of a processor is not compared
- or kept != kept_then: --> or False:
a processor is not asked again after a longer text
- if not first.equal(second) or --> if
a processor writes in the prompt
- asked = processor(text.clone(), --> asked = processor(text,
scores of a processor are compared with themselves
- scores.clone()).clone() --> scores.clone())
a window that the model does not read is not noticed
- config.sliding_window = 3  # --> pass  #
a processor is asked about a text that has ended
- allowed[:, [x for x in decoding.eos_ids if x < vocab]] = float("-inf") --> pass
the first rows are kept, not the accepted ones
- self.cache.move(prefix + rows, prefix) --> pass
rejected rows stay in the cache
- self.cache.cut(prefix + len(kept)) --> pass
a cache that grows loses its newest row
- F.pad(buffer[..., :length, :], (0, 0, 0, end + spare - length))
+ F.pad(buffer[..., : length - 1, :], (0, 0, 0, end + spare - length + 1))
a drafter keeps the rows of rejected tokens
- agreed = int(same.cumprod(0).sum()) --> agreed = end
nothing may be left to feed
- end = min(fed.shape[1], input_ids.shape[1] - 1)
+ end = min(fed.shape[1], input_ids.shape[1])
a drafter's positions are one too high
- return torch.arange(old, end, device --> return torch.arange(old + 1, end + 1, device
greedy: any child is accepted
- node = child.get((node, tokens[-1]))
+ node = next((n for (p, _), n in child.items() if p == node), None)
processors do not see the path to a node
- scores = self.process(logits[node + 1])
+ scores = logits[node + 1] if node >= 0 else self.process(logits[node + 1])
a walk continues after the end of the answer
- if ended(): --> if ended() and False:
hidden states of rejected nodes
- hidden = hidden[rows] --> pass
sampling: tokens are tried that are no children
- sampled.setdefault(parent, []).append((token
+ sampled.setdefault(-1, []).append((token
every sibling is tried with the first one's probabilities
- []).append((token, q_draft))
+ []).append((token, self.probs[self.parents.index(parent)]))
only one sibling is tried
- for token, q_draft in siblings: --> for token, q_draft in siblings[:1]:
siblings are tried in order of q, not of drawing
- for token, q_draft in siblings:
+ for token, q_draft in sorted(siblings, key=lambda each: -float(each[1][each[0]])):
of equal siblings only one is tried
- for token, q_draft in siblings:
+ for token, q_draft in {each[0]: each for each in siblings}.values():
sampling: too much is accepted
- * q_draft[token] < left[token] --> * q_draft[token] < 2 * left[token]
sampling: no residual
- residual = (left - q_draft).clamp(min=0) --> residual = left.clone()
a draw of 0 takes the first token, even one of probability 0
- drawn, right=True) --> drawn)
the hidden states of a round take the place of older ones
- self.buffer = appended(self.buffer, prefix, hidden[None, : len(kept)])
+ self.buffer = appended(self.buffer, max(0, prefix - 1), hidden[None, : len(kept)])
no place is left for the bonus token
- max_length - self.ids.shape[1] - 1 --> max_length - self.ids.shape[1]
a draft token is drawn from another distribution than is reported
- index = sample(q) if decoding.do_sample
+ index = sample(q.sqrt()) if decoding.do_sample
processors do not see what was drafted before
- decoding.process(whole.scatter(0, vocab_ids, scores), drafted)
+ decoding.process(whole.scatter(0, vocab_ids, scores))
Granite's and Cohere's logits are not scaled
- logits = logits * scale --> pass
Gemma-2's logits are not capped
- return logits if cap is None else torch.tanh(logits / cap) * cap --> return logits
queries turn the other way than keys
- rotated = rotated * cos + rotate_half(rotated) * sin
+ rotated = rotated * cos - rotate_half(rotated) * sin
Mistral is decoded beyond its window
- ["sliding_attention" if window else "full_attention"] --> ["full_attention"]
a head that is quantised is read as if it were not
- if not isinstance(head, nn.Linear) or not is_plain_weight(head.weight): --> if False:
a target without some of its weights is random there
- if missing:  # transformers --> if False:  # transformers
a renewed drafter sees a token more
- first = decoding.ids.shape[1] - window --> first = decoding.ids.shape[1] - window - 1
a renewed drafter reads the rows of the whole text
- return keys[:, :, self.first :], values[:, :, self.first :] --> return keys, values
a window is never renewed
- if decoding.ids.shape[1] > first + 2 * window: --> if False:
rows behind an edit are kept
- self.cached = int(same.cumprod(0).sum()) --> self.cached = int(same.sum())
rows of an interrupted round are kept
- self.cache.cut(self.cached) --> pass
a cache is taken over twice
- after.cache = after.buffer = None --> pass
rows of a target that has changed are kept
- if after.state != self.state: --> if False:
the loss of a router is computed while decoding
- "output_router_logits": False} --> "output_router_logits": True}
Gemma 4's heads are all as small as its lowest ones
- top = config.per_layer_config[-1] --> top = config.per_layer_config[0]

# glide.py
the block mask shows a position its own block
- return (block[:, :, None] > block[:, None, :])[:, None]
+ return (block[:, :, None] >= block[:, None, :])[:, None]
the block mask has no phase
- (places + phase[:, None]) // block_size
+ (places + 0 * phase[:, None]) // block_size
a position that may read nothing reads all
- heads = heads * any_row --> heads = heads
while drafting a token reads its own row of the target
- cross_mask = (query > target_rows --> cross_mask = (query >= target_rows
of a long prompt only the end is fed
- for part in new.split(512, dim=1): --> for part in [new[:, -512:]]:
without distillation the drafter learns its input
- tokens = batch.input_ids[:, 1:][batch.loss_mask[:, 1:]]
+ tokens = batch.input_ids[:, :-1][batch.loss_mask[:, 1:]]
learned distributions are those of twice the temperature
- common.target_logits(target, hidden, vocab_ids).softmax(-1)
+ (common.target_logits(target, hidden, vocab_ids) / 2).softmax(-1)

# cape.py
a range does not hold its upper bound
- bisect.bisect_left(config.bounds, confidence)
+ bisect.bisect_right(config.bounds, confidence)
extras are one level too deep
- [trajectory.parents[step] for step in steps] --> steps
a set holds the trajectory's token
- others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0) --> others = q_draft
extras claim to be sampled
- return common.Draft(tokens, parents, q_draft, trajectory
+ return common.Draft(tokens, parents, q_draft[[0] * len(tokens)], trajectory
tokens of probability 0 are extras
- extra = wanted & (best.values > 0) --> extra = wanted

# specdecpp.py
a round ends only by its last token
- p_hat *= float( --> p_hat = float(
a round ends where the head is sure
- if 1 - p_hat > threshold: --> if 1 - p_hat < threshold:
the newest token is withheld
-         yield token, q_draft, p_hat
-         # y_(i-1) is submitted
+         if 1 - p_hat > threshold:
+             return
+         yield token, q_draft, p_hat
+         # y_(i-1) is submitted
e_0 is judged as well
- if i > 1: --> if i > 0:
labels exceed 1
- accept_prob[:, 0].clamp(max=1) --> accept_prob[:, 0]
Y is likelier than it says
- choice = common.sample(q_draft) --> choice = q_draft.argmax(-1, keepdim=True)
Z exchanges the shares of X and Y
- (uniform >= keep) --> (uniform < keep)
labels belong to other tokens
- accept_prob[judged[batch.loss_mask]] --> accept_prob[: len(hidden)]
the first layers are copied, not the chosen ones
- [theirs[layer] for layer in drafter.config.layers] --> theirs
tokens after a rejection see those after them
- mask = mask.tril(read)[None, None] --> mask = mask[None, None]
a causal LM is believed
- common.check_target(lm) --> pass
w_rej is ignored
- reject = drafter.config.w_rej * (1 - accept_prob) --> reject = 1 - accept_prob

# falcon.py
the relaxed mask is plain causal
- return (block[:, :, None] >= block[:, None, :])[:, None]
+ return (indices[:, None] >= indices).expand(len(phase), 1, -1, -1)
a slot learns the state before its label
- label_hidden=F.pad(hidden, (0, 0, 0, k))[:, k:-1]
+ label_hidden=F.pad(hidden, (0, 0, 0, k))[:, k - 1 : -2]
as many labels are revealed as there are slots, not misses
- number = (rate * wrong.sum(1, keepdim=True)).round()
+ number = round(rate * learns.shape[1])
runs are cut short in the order of the text
- key = torch.rand_like(block, dtype=torch.float32)
+ key = block.argsort() / block.numel()
a run may have the last slot of its block
- run = torch.randint_like(block, 1, k) --> run = torch.randint_like(block, 1, k + 1)
a run may begin in a block that is not complete or does not learn
- in_run = (learners == k) & ( --> in_run = (learners > 0) & (
the tokens of labels are revealed, and not their hidden states
- hidden=torch.where(revealed[..., None], slots.label_hidden, slots.hidden),
+ hidden=slots.hidden,
all noise is positive
- .uniform_(-amplitude, amplitude) --> .uniform_(0, amplitude)
the second pass of CSGD has other blocks
- return slots._replace( --> return slots._replace(phase=0 * slots.phase,
all texts have blocks of one phase
- phase=torch.randint(k, hidden.shape[:1], device=hidden.device),
+ phase=torch.zeros_like(hidden[:, 0, 0]).long(),
slots learn the label that they hold
- learns=slots.learns & ~revealed --> learns=slots.learns
soft and hard losses exchange their weights
- l_dist = 0.9 * l_soft + 0.1 * l_hard --> l_dist = 0.1 * l_soft + 0.9 * l_hard
the divergence is that of the drafter from the target
- l_soft = F.kl_div(log_q, p_target, reduction="sum")
+ l_soft = F.kl_div(p_target.log(), log_q.exp(), reduction="sum")
the regression is not divided by the width
- reduction="none").mean(-1).sum() --> reduction="none").sum()
each branch of a later pass continues the first one
- continued = list(branch_of.values()) --> continued = [0 for tip in branch_of]
each branch is fed the first tokens on its path, not the last ones
- fed = [texts[tip][-k:] for tip in branch_of]
+ fed = [texts[tip][:k] for tip in branch_of]
each node has the children of the first branch
- branch_of = {tip: branch for branch, tip in enumerate(branch_of)}
+ branch_of = {tip: 0 for tip in branch_of}
all levels are drafted by the first slot
- best = logits[:, place].softmax( --> best = logits[:, 0].softmax(
a slot is fed the token of its hidden state, not the next one
- token_ids = decoding.ids[:, self.slots_read + 1 :]
+ token_ids = decoding.ids[:, self.slots_read : -1]
drafting is plain causal
- mask = block[start:end, None] >= block[:end]
+ mask = positions[start:end, None] >= positions[:end]
blocks are counted from the first slot when drafting
- block = (positions - total) // k --> block = positions // k
a part of a prompt ends within a block
- sorted(range(length - size, 0, -size)) --> list(range(size, length, size))
the LSTM forgets what it has read
- return self.fusion(pairs, state) --> return self.fusion(pairs)
a branch sees other branches
- return torch.cat([mask[continued], own
+ return torch.cat([torch.ones_like(mask[continued]), own
a sibling may hold the token of an earlier one
- logits = logits.masked_fill(vocab_ids == token, float("-inf")) --> logits = logits
a sibling may hold a token that a logits processor forces again
- if picked is None or picked[1][taken].any(): --> if picked is None:
siblings are judged by the distribution of the first one
- yield int(token), q_draft
+ first = q_draft if not len(taken) else first
+         yield int(token), first
all nodes are sampled by the same random number
- picked = common.pick( --> picked = torch.manual_seed(0) and common.pick(
sampled nodes get each other's probabilities
- torch.stack(list(q_of.values())) --> torch.stack(list(q_of.values())[::-1])
nodes below an end of the answer are drafted
- if path in ranks and token not in decoding.eos_ids: --> if path in ranks:
the tree continues beyond the last token that may be written
- for depth in range(decoding.max_depth):
+ for depth in range(decoding.max_depth + 1):

# ctc_drafter.py
slots do not see their anchor
- up_to = rows <= anchors[..., None] --> up_to = rows < anchors[..., None]
slots see those of earlier anchors
- own = own.repeat_interleave(slots, dim=1)
+ own = own.cumsum(0).bool().repeat_interleave(slots, dim=1)
repeats are not merged
- merged = [symbol for symbol, _ in itertools.groupby(alignment)] --> merged = alignment
a repeat needs no blank in between
- entering = in_blank * q --> pass
a second blank in a row is lost
- new_blank[prefix] = either * q_blank --> new_blank[prefix] = in_token * q_blank
the first token needs only one blank before it
- log_q[:, :-1, -1].cumsum(-1) --> log_q[:, :-1, -1]
windows begin with the newest token
- F.pad(y[:, 1:], (0, U - 1), value=-1) --> F.pad(y[:, :-1], (0, U - 1), value=-1)
anchors are those of the first rows
- order = torch.rand_like(whole, dtype=torch.float32)
+ order = torch.arange(whole.shape[1]).flip(0).expand(whole.shape).float()
the oldest states are read in every round, not the new ones
- decoding.hidden[:, read:] --> decoding.hidden[:, : decoding.ids.shape[1] - 1 - read]
the slots of earlier rounds stay in the cache
- memory.cache.cut(read + n) --> pass
a sequence has the probability of its unlikeliest alignment
- ranked.setdefault(sequence, -minus_q) --> ranked[sequence] = -minus_q
a blank is drafted where nothing is merged
- choices = [slot[:-1] for slot in choices] --> pass
drafts continue after an end
- (sequence[-1] in eos_ids or len(sequence) >= max_depth) --> len(sequence) >= max_depth
a complete prefix takes a place in the beam
- if not complete(p, eos_ids, max_depth) --> if p is not None
probabilities that are too small for a float have no gradient
- drafter.logits(states, head).log_softmax(-1)
+ drafter.logits(states, head).softmax(-1).log()
a slot that is blank for certain has no other logarithm
- memory.head).log_softmax(-1) --> memory.head).softmax(-1).log()
without a transform, the first token may come from any slot
- log_q = log_q[:1] --> pass
a token is drawn, but submitted only if it is not the likeliest one
- if picked is not None: --> if picked is not None and picked[0] != picked[1].argmax():
a token is drawn, but does not count as drawn
- draft.probs = probs --> draft.probs = None
the drawn token is submitted only if it is likely
- for sequence in [*first, *sorted(ranked, key=ranked.get, reverse=True)]:
+ for sequence in sorted(ranked, key=ranked.get, reverse=True):

# train.py
all processes take the same part of a batch
- chosen.split(size)[accelerator.process_index] --> chosen.split(size)[0]
every step has the same random numbers
- number = seed * 1_000_003 + step --> number = seed * 1_000_003
a process divides by the weight of its own part
- accelerator.reduce(sums.to(device), "sum").tolist() --> sums.tolist()
the average over the processes stays
- accelerator.num_processes / weight --> 1 / weight
gradients are not clipped
- model.parameters(), args.clip) --> model.parameters(), math.inf)
the learning rate stays at its peak
- args.lr * schedule(fraction, args.warmup) --> args.lr
a step adds to the gradient of the one before
- optimizer.zero_grad() --> pass
a resumed run forgets the state of its optimizer
- optimizer.load_state_dict(state["optimizer"]) --> pass
a resumed run begins with the first batches again
- data.batch_order(lengths, args.batch_size, args.seed, run.step)
+ data.batch_order(lengths, args.batch_size, args.seed, 0)
the minutes of earlier sittings do not count
- begin = time.monotonic() - run.seconds --> begin = time.monotonic()
SIGTERM ends the run at once
- kinds = (signal.SIGINT, signal.SIGTERM) --> kinds = (signal.SIGINT,)
an interrupted run is not saved
- due = last or stop or run --> due = last or run
conversations that are held out are learned as well
- return sequences[:border], sequences[border:], answers
+ return sequences, sequences[border:], answers
the drafter is measured as it is in training
- drafter.eval() --> pass
every process has the same random numbers
- + accelerator.process_index --> + 0
measurements use other random numbers each time
- torch.manual_seed(0) --> pass
measurements change the random numbers that follow
- with torch.random.fork_rng(): --> with contextlib.nullcontext():
answers that are too short for a method are not noticed
- if not model(features.batch([most], 0.0))[1] > 0: --> if False:
a measurement that a stop cut short is kept
- return None if caught else rates --> return rates

# support/training/data.py
a key that is there twice loses its first value
- if count > 1] --> if count > 2]
null counts as a value
- for key, value in pairs if value is not None --> for key, value in pairs
what a line says besides is only named
- if more := besides - LABELS: --> if more := set():
fields of messages are not looked at
- fields = turn.keys() - {"role", "content"} --> fields = set()
what follows the last answer is dropped without a word
- besides.add("messages after the last answer") --> pass
anybody may speak
- if role not in ROLES or not --> if not
pictures between parts of text are left out
- content = "".join(texts) if whole else None --> content = "".join(texts)
ids of another tokenizer are learned
- if isinstance(text, str) and not _says --> if False and not _says
an answer that continues after its end is learned
- and tail[1] in said: --> and False:
what the template writes after the end is learned
- text = text[: tail.end(1)] --> pass
a token of the request and the answer is learned
- and ids[: len(asked)] == asked --> and True
what is before an answer may change
- same = begin >= len(before) and --> same =
a thought's head and an answer share their first characters
- begin = min(begin, _shared(request, render(other, tokenizer))) --> pass
an answer that later turns change is learned
- located = start < stop and stop >= len(then) - 1 --> located = start < stop
an answer whose end changes is not learned
- stop >= len(then) - 1 --> stop >= len(then)
answers that are not learned are not counted
- lost += answers.count((0, 0)) --> pass
answers that are cut are not counted
- cut += sum(stop > max_length --> cut += sum(False
the first token is learned
- mask[0] = False  # --> pass  #
a first turn that a second one holds is not learned
- masks[long][:length] |= masks[short] --> pass
every epoch has the same order
- manual_seed(seed * 1_000_003 + epoch) --> manual_seed(seed * 1_000_003)
batches of unlike lengths
- part = part[lengths[part].argsort(stable=True)] --> pass
prompts are the first ones, not spread over the files
- prompts[i * len(prompts) // count] --> prompts[i]

# support/packed.py
an input that was written into is taken for the same
- if input is not x or its_version != version: --> if input is not x:
what a product gave is given up at the call of the last layer
- last = calls + 1 == len(self.sizes) --> last = index + 1 == len(self.sizes)
float16 is offered for weights that it rounds
- if all(map(is_float16, weights)): --> if True:
float16 is offered for an LSTM's weights that it rounds
- yield from (x for x in module.parameters() if x.ndim == 2) --> pass
an LSTM starts each call anew
- if state is None: --> if True:
an LSTM of other options is packed
-         elif can_pack_lstm(module):
-             twin.set
+         elif isinstance(module, nn.LSTM):
+             twin.set
a copy of a packed layer has the same weights
- twin._parameters = copy.deepcopy(layer._parameters, memo) --> pass
kernels are taken that round the weights
- if not kernels or not {*kernels} <= {*possible}: --> if not kernels:
a norm of other bits is replaced
- return norm if torch.equal(norm(x), module(x)) else None --> return norm

# bench.py
all arms answer in the same order in each turn
- for arm in shuffle.sample(arms, len(arms)): --> for arm in arms:
the next turn follows the last arm's answer
- tokens = answers[arms[0].name].tokens --> tokens = answers[arms[-1].name].tokens
the first answers pay for what is loaded
- warm_up(tokenizer, arms, prompts, options) --> pass
the warm-up asks the longest prompt
- easiest = min( --> easiest = max(
the baseline is always stock transformers
- max(loops, key=lambda loop: found[loop.name]["tokens_per_s"]) --> stock
x stock is relative to the baseline
- "vs_stock", numbers, found[stock.name] --> "vs_stock", numbers, found[baseline.name]
stock transformers decodes with packed layers
- return stock, packed.pack(stock), tokenizer
+ return (packed.pack(stock), packed.pack(stock), tokenizer)
settings that were saved with a target change what is measured
- cli.plain_settings(stock) --> pass
alpha counts the prompt's tokens as well
- answered = (place >= prompt.shape[1])[None] --> answered = (place >= 0)[None]
drafting counts as prefill
- phase = "draft" --> pass
transformers' drafted tokens include the prompt
- drafted=sum(fed) - (length - 1) - len(fed) --> drafted=sum(fed) - len(fed)
sampling is cut to 50 tokens
- "top_k": 0} --> "top_k": 50}
sampled answers do not follow from the seed
- torch.manual_seed(args.seed) --> pass
a first prompt that is too long ends the run
- if not asked and prompt is prompts[-1]: --> if not asked:
a lack of memory loses what was answered
- except (KeyboardInterrupt, torch.OutOfMemoryError) as problem:
+ except KeyboardInterrupt as problem:
answers parted if one of them is longer are equal
- if each[1].tokens != each[2].tokens]
+ if any(a != b for a, b in zip(each[1].tokens, each[2].tokens))]

# support/measuring/report.py
tau does not count the first forward
- "tau": lambda total: total["tokens"] / total["forwards"]
+ "tau": lambda total: total["tokens"] / max(1, total["drafts"])
the first draft, which is part of the prefill, counts as drafting
- / max(1, total["drafts"]) --> / total["forwards"]
turns of a prompt are drawn apart
- groups.setdefault(answer.prompt, []) --> groups.setdefault(len(groups), [])
the ratio of two arms is upside down
- return tokens / seconds * their_seconds / their_tokens
+ return their_tokens / their_seconds * seconds / tokens
the interval holds half of the draws
- torch.tensor([0.025, 0.975] --> torch.tensor([0.25, 0.75]
four prompts have an interval
- if len(prompts) < 5: --> if len(prompts) < 4:
what is no number is 0
- parse_constant=lambda name: None --> parse_constant=lambda name: 0.0

# support/measuring/arms.py
CAPE's chains have the length of its drafter's training
- chain = {"gamma": 4} --> chain = {}
settings of an arm do not reach its drafts
- module.drafts(*given, **changes, **window) --> module.drafts(*given, **window)
a window does not reach the drafts
- module.drafts(*given, **changes, **window) --> module.drafts(*given, **changes)
a window does not reach CAPE's chains
- source.drafts(*given, **chain, **window) --> source.drafts(*given, **chain)
copied tokens are not added
- return lookup.with_copies(proposals, decoding, COPIES) --> return proposals
the word for copies is taken for a part of the folder
- if folder.endswith("+copies"): --> if False:

# support/cli.py
nan is a number of at least 0
- if not low <= value <= high: --> if value < low or value > high:
options may be abbreviated
- allow_abbrev=False --> allow_abbrev=True
the special tokens of a target are lost with its settings
- GenerationConfig(**tokens) --> GenerationConfig()
a device is a place for a result
- if special or not ( --> if not (
a user's mistake is a traceback
- if not isinstance(problem, mistakes): --> if True:

# support/prompts.py
a last answer need not be written
- if role == "assistant" and number < len(messages): --> if role == "assistant":
a text is found in an earlier turn
- place = found + len(said) --> pass
a template writes the date of today
- if "strftime_now" in template: --> if False:
a tokenizer's end token ends a request
- return whole[: before + len(ids)] --> return whole
the padding before a prompt is read
- [0] * (width - len(ids)) + [1] * len(ids) for --> [1] * width for
what follows the end of an answer belongs to it
- length = next(stops, len(new)) --> length = len(new)

# support/training/features.py
a file that holds other layers is taken
- if states.keys() >= wanted: --> if states:
a damaged file ends the run
- contextlib.suppress(FileNotFoundError, SafetensorError)
+ contextlib.suppress(FileNotFoundError)
a file that this user may not read is written anew
- contextlib.suppress(FileNotFoundError, SafetensorError)
+ contextlib.suppress(OSError, SafetensorError)
targets that differ in their weights share their features
- mark.update(some.double().cpu().numpy().tobytes()) --> pass
keys and values are exchanged
- computed[f"k{layer}"], computed[f"v{layer}"] = kv[layer]
+ computed[f"v{layer}"], computed[f"k{layer}"] = kv[layer]

# support/training/checkpoints.py
config.json marks a drafter whose weights are not there yet
- ("training_state.pt", "model.safetensors", "curve.json", "config.json")
+ ("config.json", "training_state.pt", "model.safetensors", "curve.json")
a run goes on with other data
- decides["data"] = f"of content {content.hexdigest()[:16]}" --> pass
a run goes on with another target
- decides["target"] = f"of content {fingerprint(target)}" --> pass
the weights are not those of the state
- copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(part)
+ drafter.to(torch.bfloat16).save_pretrained(part)

# support/files.py
a link is replaced by a file
- path = path.resolve() --> pass
weights can be read by their owner only
- path.chmod(0o666 & ~umask) --> pass
"""


def parsed(text: str) -> list[tuple[str, str, str]]:
    """The mutants of a file's part of the text, (old, new, what is wrong)."""
    mutants = []
    text = text.replace(" --> ", "\n+ ")
    for what, lines in re.findall(r"^([^-+\n].*)\n((?:[-+].*\n)+)", text, re.MULTILINE):
        old = re.findall(r"^-.?(.*)", lines, re.MULTILINE)
        new = re.findall(r"^\+.?(.*)", lines, re.MULTILINE)
        mutants.append(("\n".join(old), "\n".join(new), what))
    return mutants


_, *PARTS = re.split(r"^# (.*)\n", TEXT, flags=re.MULTILINE)  # name, text, name, ...
MUTANTS = dict(zip(PARTS[::2], map(parsed, PARTS[1::2])))
