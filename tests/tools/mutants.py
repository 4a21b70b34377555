"""The mutants of mutation.py: {file: (its tests, changes)}; a change is (old, new, what is wrong).

The old text occurs once in the file. Changes that leave the program right are no mutants: a token
that was refused, for instance, has no probability left, whatever is done about it.
"""

COMMON = [
    # masks, positions, caches
    (
        "may_attend[node + 1] |= may_attend[parent + 1]",
        "may_attend[node + 1] |= may_attend[0]",
        "a node sees the root and itself only",
    ),
    (
        "mask[0, 0, :, prefix:].masked_fill_(~may_attend, torch.finfo(dtype).min)",
        "pass",
        "every node sees every other one",
    ),
    (
        "positions = prefix + depths[None]",
        "positions = prefix + torch.arange(len(depths))[None]",
        "positions count rows, not levels",
    ),
    (
        "layer.keep(prefix, prefix + kept)",
        "layer.cut(prefix + len(kept))",
        "the first rows are kept, not the accepted ones",
    ),
    (
        "layer.cut(prefix + len(kept))",
        "pass",
        "refused rows stay in the cache",
    ),
    (
        "self.cut(start + len(rows))",
        "self.cut(start + len(rows) + 1)",
        "keep leaves a row too many",
    ),
    (
        "F.pad(x[:, :, :start], (0, 0, 0, spare))",
        "F.pad(x[:, :, : start - 1], (0, 0, 0, spare + 1))",
        "a cache that doubles loses its newest row",
    ),
    (
        "max(256, 2 * end)",
        "end",
        "every step copies the whole cache",
    ),
    (
        "agreed = int(same.cumprod(0).sum())",
        "agreed = end",
        "a drafter keeps the rows of refused tokens",
    ),
    (
        "        self.cut(agreed)\n",
        "",
        "a drafter's refused rows stay in its cache",
    ),
    (
        "end = min(self.fed.shape[1], input_ids.shape[1] - 1)",
        "end = min(self.fed.shape[1], input_ids.shape[1])",
        "nothing may be left to feed",
    ),
    (
        "return torch.arange(start, self.fed.shape[1], device",
        "return torch.arange(start + 1, self.fed.shape[1] + 1, device",
        "a drafter's positions are one too high",
    ),
    # the walk
    (
        "node = child.get((node, token))",
        "node = next((n for (p, _), n in child.items() if p == node), None)",
        "greedy: any child is accepted",
    ),
    (
        "scores = logits_processor(ids, scores)",
        "scores = logits_processor(input_ids, scores)",
        "processors do not see the path to a node",
    ),
    (
        "if not (do_sample or logits_processor):",
        "if not do_sample:",
        "greedy: processors are ignored",
    ),
    (
        "logits[0].float().argmax(-1)",
        "logits[0].argmax(-1)",
        "greedy: float64 where transformers compares in float32",
    ),
    (
        "return Verified(tokens, path, hidden[:, kept.to(hidden.device)], logits)",
        "return Verified(tokens, path, hidden[:, : len(kept)], logits)",
        "hidden states of refused nodes",
    ),
    (
        "siblings = [n for n in range(sampled) if draft.parents[n] == node]",
        "siblings = list(range(sampled))",
        "sampling: tokens are tried that are no children",
    ),
    (
        "* q_draft[token] < p_target[token]",
        "* q_draft[token] < 2 * p_target[token]",
        "sampling: too much is accepted",
    ),
    (
        "residual = (p_target - q_draft).clamp(min=0)",
        "residual = p_target.clone()",
        "sampling: no residual",
    ),
    (
        "return int(sample(p_target))",
        "return int(p_target.argmax())",
        "sampling: the argmax in place of a draw",
    ),
    (
        "uniform * sums[..., -1:], right=True)",
        "uniform * sums[..., -1:])",
        "a draw of 0 takes the first token, even one of probability 0",
    ),
    (
        "uniform * sums[..., -1:], right=True)",
        "uniform, right=True)",
        "weights that do not sum to 1 are drawn wrongly",
    ),
    # decoding
    (
        "for count in range(1, tokens.shape[1] + 1):",
        "for count in [tokens.shape[1]]:",
        "an answer runs past its end",
    ),
    (
        "path = path[:emitted]",
        "pass",
        "accepted nodes beyond the end are counted",
    ),
    (
        "self.hidden = verified.hidden[:, :count]",
        "self.hidden = verified.hidden[:, -1:]",
        "drafters get the last hidden state of a round only",
    ),
    (
        "self.streamer.put(tokens[:, :count].cpu())",
        "self.streamer.put(tokens.cpu())",
        "the streamer gets tokens beyond the end",
    ),
    (
        "self.ids.shape[1] - 1\n\n    def pick",
        "self.ids.shape[1]\n\n    def pick",
        "no place is left for the bonus token",
    ),
    (
        "token = sample(q_draft) if self.do_sample",
        "token = sample(q_draft.sqrt()) if self.do_sample",
        "a draft token is drawn from another distribution than is told",
    ),
    (
        'if not scores.max() > float("-inf"):',
        'if scores.max() == float("-inf"):',
        "a draft token is chosen among NaN",
    ),
    # the target, and what is refused
    (
        "logits = logits * _logit_scale(target)",
        "pass",
        "Granite's and Cohere's logits are not scaled",
    ),
    (
        "weight = weight * scale",
        "pass",
        "the draft head does not scale as the target does",
    ),
    (
        "return logits if cap is None else torch.tanh(logits / cap) * cap",
        "return logits",
        "Gemma-2's logits are not capped",
    ),
    (
        "rotated = rotated * cos + rotate_half(rotated) * sin",
        "rotated = rotated * cos - rotate_half(rotated) * sin",
        "queries turn the other way than keys",
    ),
    (
        "if not torch.allclose(scale, other, atol=1e-2, rtol=1e-2):",
        "if False:",
        "norms around zero are copied into norms around one",
    ),
    (
        "if reach and limit > reach:",
        "if reach and limit >= reach:",
        "an answer that fills the target's context is refused",
    ),
    (
        'slides = kinds is None or "sliding_attention" in kinds',
        'slides = kinds is not None and "sliding_attention" in kinds',
        "Mistral is decoded beyond its window",
    ),
    (
        "    check_states(target)\n    most_frequent",
        "    most_frequent",
        "drafters are built for targets whose logits are misread",
    ),
    (
        'if mode not in ("greedy_search", "sample"):',
        "if False:",
        "beam search is decoded greedily",
    ),
    (
        "if not isinstance(drafter, Drafter):",
        "if False:",
        "a drafter of another method is taken",
    ),
]

LOOKUP = [
    (
        "self.follows[tuple(self.text[-n:])] = len(self.text)",
        "self.follows.setdefault(tuple(self.text[-n:]), len(self.text))",
        "copies follow the first occurrence, not the last one",
    ),
    (
        "self.lengths = {4: most, 3: most // 2, 2: most // 3}",
        "self.lengths = {2: most // 3, 3: most // 2, 4: most}",
        "the shorter match is taken first",
    ),
    (
        "below[0] = node",
        "below[0] = -1",
        "a copy always starts at the root",
    ),
    (
        "while found and (node, found[0]) in child:",
        "if found and (node, found[0]) in child:",
        "a copy shares no more than the draft's first token",
    ),
    (
        "return common.Draft(tokens, parents, draft.probs, q, len(found), draft.notes)",
        "return common.Draft(tokens, parents, None, q, len(found), draft.notes)",
        "with copies, sampled nodes count as certain and are accepted less often",
    ),
]

GLIDE = [
    (
        "return (block[:, :, None] > block[:, None, :])[:, None]",
        "return (block[:, :, None] >= block[:, None, :])[:, None]",
        "the block mask shows a position its own block",
    ),
    (
        "(places + phase[:, None]) // block_size",
        "(places + 0 * phase[:, None]) // block_size",
        "the block mask has no phase",
    ),
    (
        "return out * some",
        "return out",
        "a position that may read nothing reads all",
    ),
    (
        "cross_mask = query > cached",
        "cross_mask = query >= cached",
        "while drafting a token reads its own row of the target",
    ),
    (
        "predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))",
        "predicts = batch.loss_mask",
        "the loss is off by one position",
    ),
    (
        "following = batch.input_ids[:, 1:][predicts[:, :-1]]",
        "following = batch.input_ids[:, :-1][predicts[:, :-1]]",
        "without distillation the drafter learns its input",
    ),
    (
        "teacher.softmax(-1), reduction",
        "teacher.mul(2).softmax(-1), reduction",
        "distillation sharpens the labels",
    ),
    (
        "return tokens / (gamma * cost + 1)",
        "return tokens / ((gamma + 1) * cost + 1)",
        "the expected speedup has a drafter pass too many",
    ),
]

CAPE = [
    (
        "bisect.bisect_left(bounds, confidence)",
        "bisect.bisect_right(bounds, confidence)",
        "a range does not hold its upper bound",
    ),
    ("parents.append(step - 1)", "parents.append(step)", "extras are one level too deep"),
    (
        "others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)",
        "others = q_draft",
        "a set holds the trajectory's token",
    ),
    (
        "        q_draft,\n        torch.cat([trajectory.q",
        "        torch.cat([q_draft, q_draft[-1:].expand(len(tokens), -1)]),\n"
        "        torch.cat([trajectory.q",
        "extras claim to be sampled",
    ),
]

SPECDECPP = [
    (
        "all_accepted *= float(",
        "all_accepted = float(",
        "a round ends by its last token alone",
    ),
    (
        "if 1 - all_accepted > threshold:",
        "if 1 - all_accepted < threshold:",
        "a round ends where the head is sure",
    ),
    (
        "accept_prob.append(ratio[:, 0].clamp(max=1))",
        "accept_prob.append(ratio[:, 0])",
        "labels exceed 1",
    ),
    ("(to_mix >= keep)", "(to_mix < keep)", "Z exchanges the shares of X and Y"),
    (
        "return hidden, accept_prob[judged[batch.loss_mask]]",
        "return hidden, accept_prob[: len(hidden)]",
        "labels belong to other tokens",
    ),
    (
        "weight_rej = drafter.config.w_rej * (1 - accept_prob)",
        "weight_rej = 1 - accept_prob",
        "w_rej is ignored",
    ),
    (
        "sum(not agree for agree in agrees[:-1])",
        "sum(not agree for agree in agrees)",
        "the oracle counts the last token",
    ),
    (
        "return (c2 + delta) / (c1 + c2 + delta)",
        "return c2 / (c1 + c2 + delta)",
        "Theorem 3.1 without Delta",
    ),
]

FALCON = [
    (
        "return (block[:, :, None] >= block[:, None, :])[:, None]",
        "return (slots[:, None] >= slots).expand(len(phase), 1, -1, -1)",
        "the relaxed mask is plain causal",
    ),
    (
        "return torch.cat([mask[continues], own",
        "return torch.cat([torch.ones_like(mask[continues]), own",
        "a branch sees other branches",
    ),
    (
        "mask = block[-length:, None] >= block",
        "mask = slots[-length:, None] >= slots",
        "drafting is plain causal",
    ),
    (
        "left = round(rate * counts[row])",
        "left = round(rate * len(learning))",
        "as many answers are revealed as there are slots, not misses",
    ),
    (
        "learns=slots.learns & ~revealed",
        "learns=slots.learns",
        "slots learn the answer that they hold",
    ),
    (
        "answers=F.pad(hidden, (0, 0, 0, k))[:, k:-1]",
        "answers=F.pad(hidden, (0, 0, 0, k))[:, k - 1 : -2]",
        "a slot learns the state before its answer",
    ),
    (
        "distillation = 0.9 * soft + 0.1 * hard",
        "distillation = 0.1 * soft + 0.9 * hard",
        "soft and hard losses exchange their weights",
    ),
    (
        "rate = 0.4 * (1 - batch.progress)",
        "rate = 0.4 * batch.progress",
        "answers are revealed late, not early",
    ),
]

CTC_DRAFTER = [
    (
        "up_to = rows <= anchor[..., None]",
        "up_to = rows < anchor[..., None]",
        "slots do not see their anchor",
    ),
    (
        "(group[:, None] == group)",
        "(group[:, None] >= group)",
        "slots see those of earlier anchors",
    ),
    (
        "symbol, _ in itertools.groupby(alignment) if",
        "symbol in alignment if",
        "repeats are not merged",
    ),
    (
        "entering = in_blank[prefix] * q",
        "pass",
        "a repeat needs no blank in between",
    ),
    (
        "new_blank[prefix] += either * q_blank",
        "new_blank[prefix] += in_token[prefix] * q_blank",
        "a second blank in a row is lost",
    ),
    (
        "log_q[:, :-1, -1].cumsum(-1), (1, 0)",
        "log_q[:, :-1, -1], (1, 0)",
        "the first token needs only one blank before it",
    ),
    (
        "F.pad(best[:, 1:-1], (0, U)).unfold",
        "F.pad(best[:, :-2], (0, U)).unfold",
        "windows begin with the newest token",
    ),
    (
        "memory.cache.cut(decoding.ids.shape[1] - 1)",
        "pass",
        "the slots of earlier rounds stay in the cache",
    ),
]

MUTANTS = {
    "common.py": (("test_verify.py", "test_lossless.py"), COMMON),
    "support/rivals/lookup.py": (("test_verify.py",), LOOKUP),
    "glide.py": (("test_glide.py",), GLIDE),
    "cape.py": (("test_cape.py",), CAPE),
    "specdecpp.py": (("test_specdecpp.py",), SPECDECPP),
    "falcon.py": (("test_falcon.py",), FALCON),
    "ctc_drafter.py": (("test_ctc_drafter.py",), CTC_DRAFTER),
}
