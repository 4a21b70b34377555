"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_cli.py"]
MUTANTS = [
    (
        "support/cli.py",
        "name == DEFAULT_TARGET and not Path(name).exists()",
        "name == DEFAULT_TARGET",
        "a folder that has the default target's name is passed over",
    ),
    ("support/cli.py", "if not value <= high:", "if value > high:", "nan is a number"),
    (
        "support/cli.py",
        "number(type(default), min(default, 0))",
        "number(type(default), 0)",
        "a default of -1 cannot be asked for",
    ),
    (
        "support/cli.py",
        "        if isinstance(value, bool):\n            return False\n",
        "",
        "true is a number in a list",
    ),
    (
        "support/cli.py",
        'left_out = decode and not option.metadata.get("decode")',
        "left_out = False",
        "bench.py offers what only training heeds",
    ),
    (
        "support/cli.py",
        'hasattr(import_method(name), "build")',
        'hasattr(import_method(name), "generate")',
        "cape can be trained",
    ),
    (
        "support/cli.py",
        "if importlib.util.find_spec(name) is None:",
        "if False:",
        "a method without its file",
    ),
    (
        "support/cli.py",
        'proposes = "cache" in inspect',
        'proposes = "drafter" in inspect',
        "Falcon drafts chains",
    ),
    (
        "support/cli.py",
        "{' '.join(str(problem).split())}",
        "{problem}",
        "a mistake of several lines",
    ),
    (
        "support/cli.py",
        '        if not isinstance(problem, torch.distributed.DistError) and "gloo" not in '
        "str(problem):\n            raise\n",
        '        if not isinstance(problem, torch.distributed.DistError) and "gloo" not in '
        "str(problem):\n            sys.exit(2)\n",
        "a bug passes for a mistake of the user",
    ),
    (
        "support/cli.py",
        'owners = [f"{word}{_owners(word)}" for word in flags]',
        "owners = flags",
        "an option does not name its method",
    ),
    (
        "support/cli.py",
        "super().__init__(allow_abbrev=False, **options)",
        "super().__init__(**options)",
        "options may be cut short",
    ),
    (
        "support/bench_options.py",
        "if args.checkpoint and (",
        "if False and (",
        "one drafter for several methods",
    ),
    (
        "support/bench_options.py",
        "    if not args.top_p:\n",
        "    if False:\n",
        "nothing to sample from",
    ),
    (
        "support/cli.py",
        "if decode and has_drafter:",
        "if has_drafter:",
        "train.py --method NAME --help shows no default of any of the method's options",
    ),
    (
        "support/cli.py",
        "all(fits(item, default[0]) for item in items)",
        "any(fits(item, default[0]) for item in items)",
        "json_like: one fitting item lets wrong ones through, and [] is refused",
    ),
    (
        "support/bench_options.py",
        "if one_by_one and (not args.method or args.temperature):",
        "if one_by_one and not args.method:",
        "--sweep and --refit with a temperature are not refused",
    ),
]
