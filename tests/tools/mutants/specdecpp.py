"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_specdecpp.py"]
MUTANTS = [
    (
        "specdecpp.py",
        "accept_prob.append(ratio[:, 0].nan_to_num(1).clamp(max=1))",
        "accept_prob.append(torch.ones_like(ratio[:, 0]))",
        "labels: all accepted",
    ),
    (
        "specdecpp.py",
        ".nan_to_num(1).clamp(max=1))",
        ".nan_to_num(1))",
        "labels: p / q may exceed 1",
    ),
    (
        "specdecpp.py",
        "p_target = distribution(target_scores, config.temperature, config.top_p)",
        "p_target = distribution(target_scores, config.temperature, 1.0)",
        "labels: the target's without top-p",
    ),
    (
        "specdecpp.py",
        "p_target = distribution(target_scores, config.temperature, config.top_p)",
        "p_target = distribution(target_scores, min(config.temperature, 1.0) and 1.0, config.top_p)",
        "labels: the target's without temperature",
    ),
    (
        "specdecpp.py",
        "shown = q_draft if config.temperature else scores.softmax(-1)",
        "shown = q_draft",
        "head's input: q of greedy drafts is 1",
    ),
    (
        "specdecpp.py",
        "passed = sums <= uniform[:, None]",
        "passed = sums < 1 - uniform[:, None]",
        "inverse CDF: from the other end",
    ),
    ("specdecpp.py", "weight_rej = drafter.config.w_rej *", "weight_rej = 1 *", "loss: w_rej"),
    (
        "specdecpp.py",
        "return total / (accept_prob + weight_rej).sum().clamp(min=1e-6)",
        "return total / len(accept_prob)",
        "loss, head: normalisation",
    ),
    ("specdecpp.py", "F.logsigmoid(-logit)", "F.logsigmoid(logit)", "loss, head: sign"),
    ("specdecpp.py", "(to_mix >= config.keep)", "(to_mix < config.keep)", "Z: r and 1 - r"),
    (
        "specdecpp.py",
        "mixed = torch.where(taken, drafted, batch.input_ids)",
        "mixed = batch.input_ids",
        "Z: only the target's",
    ),
    (
        "specdecpp.py",
        "return hidden, torch.cat(of_q)[judged], torch.cat(accept_prob)[judged]",
        "return hidden, torch.cat(of_q)[judged], torch.cat(accept_prob)[: len(hidden)]",
        "labels: of the first tokens, not of Z's",
    ),
    (
        "specdecpp.py",
        "        rows = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T) row t - 1 predicts token t\n"
        "        p_target",
        "        rows = batch.loss_mask\n        p_target",
        "loss, draft: rows off by one",
    ),
    (
        "specdecpp.py",
        "self.head.requires_grad_(not self.distils)",
        "self.head.requires_grad_(True)",
        "stage draft: the head moves, too",
    ),
    (
        "specdecpp.py",
        "log_q = of_q.to(x.dtype).clamp(min=1e-9).log()",
        "log_q = of_q.to(x.dtype)",
        "head_sees confidence: q instead of log q",
    ),
    ("specdecpp.py", "all_accepted *= float(", "all_accepted = float(", "stop rule: no product"),
    (
        "specdecpp.py",
        "1 - all_accepted > config.threshold",
        "1 - all_accepted < config.threshold",
        "stop rule: sign",
    ),
    (
        "specdecpp.py",
        "if config.true_probability else 0.0",
        "if not config.true_probability else 0.0",
        "stop rule: the other scale",
    ),
    (
        "specdecpp.py",
        "bias = math.log(config.w_rej)",
        "bias = -math.log(config.w_rej)",
        "stop rule: log w_rej taken away",
    ),
    (
        "specdecpp.py",
        "        yield token, q_draft, hidden\n",
        "        of_q = None if of_q is None else q_draft[token]\n"
        "        yield token, q_draft, hidden\n",
        "stop rule: q of the token after",
    ),
    (
        "specdecpp.py",
        'if config.stop == "head" and of_q is not None:',
        'if config.stop == "head":\n            of_q = q_draft[token] if of_q is None else of_q',
        "stop rule: the first token is judged by e_0",
    ),
    (
        "specdecpp.py",
        'limit = config.gamma if config.stop == "fixed" else config.max_draft',
        "limit = config.max_draft",
        "fixed K is ignored",
    ),
    (
        "specdecpp.py",
        "        draft = lookup.merge(draft, input_ids, room)\n",
        "        lookup.merge(draft, input_ids, room)\n",
        "copies: found and not used",
    ),
    (
        "specdecpp.py",
        "q_draft = scores.softmax(-1)[0]  # (V,)",
        "q_draft = (scores / 1.3).softmax(-1)[0]",
        "propose: another q than the head learned",
    ),
    (
        "specdecpp.py",
        "torch.multinomial(q_draft, 1)",
        "torch.multinomial(q_draft.sqrt(), 1)",
        "propose: drawn from another q than it says",
    ),
    (
        "specdecpp.py",
        'if not scores.max() > float("-inf"):',
        'if scores.max() == float("-inf"):',
        "drafts from NaN where nothing may be drafted",
    ),
    (
        "specdecpp.py",
        "    return (c2 + delta) / (c1 + c2 + delta)",
        "    return c2 / (c1 + c2 + delta)",
        "Theorem 3.1: no Delta",
    ),
    (
        "specdecpp.py",
        "sum(not agree for agree in agrees[:-1])",
        "sum(not agree for agree in agrees)",
        "oracle: the last token counts",
    ),
    (
        "specdecpp.py",
        ".softmax(-1)[:, draft_ids]  # (M, Vd)\n    return torch.minimum",
        ".softmax(-1)[:, draft_ids].softmax(-1)  # (M, Vd)\n    return torch.minimum",
        "alpha: softmax twice",
    ),
    (
        "specdecpp.py",
        "to_mix >= config.keep",
        "to_mix < config.keep",
        "Z: shares of X and Y exchanged",
    ),
    (
        "specdecpp.py",
        "small.layer_types = [small.layer_types[layer] for layer in config.layers]",
        "small.layer_types = small.layer_types[: len(config.layers)]",
        "copied layers get the attention kind and rotary table of the target's first ones",
    ),
]
