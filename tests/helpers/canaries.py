"""Canaries: bytes and texts that make a file when something runs them, and a script that gives them to all of wdskit.

`python canaries.py FOLDER` works in FOLDER under an audit hook and prints events, canary files and errors as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "wdskit_canary"
"""Part of every text and file name that must not run."""

STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.forkpty", "pty.spawn", "subprocess.Popen"}


class Canary:
    """An object that pickles to a call of `exec` that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (exec, (f"open({str(self.file)!r}, 'w').close()",))


def payloads(folder: Path) -> dict[str, bytes]:
    """Return bytes by field name. They make `FOLDER/wdskit_canary.<field>` when they are unpickled or run."""
    import numpy as np

    def canary(field: str) -> Canary:
        return Canary(folder / f"{MARK}.{field}")

    fields = {}
    for field in ("pkl", "pickle", "pyd", "pth", "pt", "joblib", "dill", "cls", "index", "json", "txt", "jpg", "png"):
        fields[field] = pickle.dumps(canary(field))
    for field in ("left.pkl", "x.pickle", "PKL", "tif", "webp", "bmp", "msg", "cbor", "ten", "mp", "npz"):
        fields[field] = pickle.dumps(canary(field), protocol=2)
    archive = io.BytesIO()  # what torch.save writes
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(canary("torch.pth"), protocol=2))
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    fields["torch.pth"] = archive.getvalue()
    objects = np.empty(1, object)
    objects[0] = canary("npy")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, objects, allow_pickle=True)
    fields["npy"] = stream.getvalue()
    code = f"__import__('os').mkdir({str(folder / (MARK + '.header'))!r})"
    for number, header in enumerate(
        [
            f"{{'descr': {code}, 'fortran_order': False, 'shape': (1,)}}",
            f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({code},)}}",
            f"{{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), 'x': {code}}}",
            "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}",
            "{'descr': '|O8', 'fortran_order': False, 'shape': (0,)}",
        ]
    ):
        data = header.encode().ljust(200) + b"\n"
        fields[f"h{number}.npy"] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data)) + data + fields["pkl"]
    return fields


def commands(folder: Path) -> list[str]:
    """Return texts that make `FOLDER/wdskit_canary.text` when a shell or Python runs them."""
    file = folder / f"{MARK}.text"
    python = f"open({str(file)!r}, 'w').close()"
    return [
        f"touch {file}",
        f"$(touch {file})",
        f"`touch {file}`",
        f"| touch {file}",
        f"a.tar | touch {file}",
        f"pipe:touch {file}",
        f"pipe:cat /dev/null; touch {file}",
        f"exec:touch {file}",
        f"__import__('os').system('touch {file}')",
        python,
        f"lambda sample: {python}",
        "os.system",
        "subprocess.run",
        "builtins.eval",
        "exec",
        "__import__",
        f"{MARK}_module",
        f"{MARK}_module.function",
        f"{{a,$(touch {file})}}.tar",
        f"${{{MARK}:-$(touch {file})}}",
        "$(EVIL)",
    ]


def configs(folder: Path) -> Iterator[str]:
    """Yield YAML with commands, import paths and Python objects in all places where something could run them."""
    for text in commands(folder):
        quoted = json.dumps(text)
        yield f"version: 1\npipeline: [{{stream: {quoted}}}]"
        yield f"version: 1\npipeline: [{{stream: {{shards: [{quoted}], check: {quoted}}}}}]"
        for stage in ("map", "select", "decode", "normalize", "to_tuple", "resize", quoted):
            yield f"version: 1\npipeline: [{{stream: a.tar}}, {{{stage}: {quoted}}}]"
        yield f"version: 1\npipeline: [{{stream: a.tar}}, {{map_dict: {{cls: {quoted}}}}}, {{rename: {{a: {quoted}}}}}]"
        yield f"version: 1\npipeline: [{{stream: a.tar}}, {{batched: {{size: 2, collate: {quoted}}}}}]"
        yield f"version: 1\npipeline: [{{stream: a.tar}}]\nloader: {{start_method: {quoted}, workers: {quoted}}}"
        yield f"version: 1\nplugins: [{quoted}]\ntransforms: {{f: {quoted}}}\npipeline: [{{stream: a.tar}}]"
        yield f"version: {quoted}\n{quoted}: {quoted}"
    command = f"touch {folder / (MARK + '.yaml')}"
    for tag in ("apply:os.system", "apply:subprocess.check_output", "new:os.system", "apply:builtins.eval"):
        yield f'version: 1\npipeline: !!python/object/{tag} ["{command}"]'
        yield f'version: 1\npipeline: [{{stream: !!python/object/{tag} ["{command}"]}}]'
        yield f'!!python/object/{tag} ["{command}"]'
    for tag in ("name:os.system", f"module:{MARK}_module", "object:os.system", "bytes"):
        yield f"version: 1\npipeline: [{{stream: a.tar}}, {{map: !!python/{tag} x}}]"
    yield f'version: 1\npipeline: [{{map: !<tag:yaml.org,2002:python/object/apply:os.system> ["{command}"]}}]'


class Watch:
    """An audit hook that stores events that could run something."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if not self.on:
            return
        if event in STARTS:
            self.events.append(f"{event} {args[0]!r}")
        elif event == "os.fork":
            if not any("multiprocessing" in frame.filename for frame in traceback.extract_stack()):
                self.events.append(event)
        elif event == "pickle.find_class":
            self.events.append(f"{event} {args}")
        elif event == "import" and MARK in str(args[0]):
            self.events.append(f"{event} {args[0]}")
        elif event == "exec":
            code = args[0]
            if MARK in f"{code.co_consts} {code.co_names} {code.co_filename}":
                self.events.append(f"{event} {code.co_consts}")
        elif event == "compile" and MARK in str(args[0]):
            frame = sys._getframe(1)
            if not (frame.f_code.co_name == "parse" and frame.f_code.co_filename.endswith("ast.py")):
                self.events.append(f"{event} {args[0]!r}")  # ast.parse makes only a tree, which cannot run


def quietly(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Call a function without output; return the name of its error, or its exit status, or an empty text."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            function(*args, **kwargs)
    except SystemExit as end:
        return f"exit {end.code}"
    except Exception as err:  # noqa: BLE001 (which one is what the test asks)
        return type(err).__name__
    return ""


def command(*words: object) -> str:
    """Run wdskit's command line in this process; return as `quietly` does."""
    from wdskit.cli import main

    sys.argv = ["wdskit", *map(str, words)]
    return quietly(main)


def write_shards(folder: Path) -> list[str]:
    """Write a shard of two samples for each payload, so that one error hides no other. Returns the paths."""
    from shards import write_shard

    folder.mkdir(exist_ok=True)
    paths = []
    for number, (field, data) in enumerate(payloads(folder.parent).items()):
        samples = {f"k{number}": {field: data}, f"k{number}b": {"txt": b"x", field: data}}
        paths.append(str(write_shard(folder / f"s-{number:03d}.tar", samples)))
    return paths


def decode_everything(folder: Path) -> list[str]:
    """Decode every payload with every kind of `decode`, in this process and in workers. Returns the errors."""
    from wdskit import Pipeline
    from wdskit.codecs.images import IMAGE_SPECS

    errors = []
    shards = write_shards(folder / "shards")
    for path in shards:
        for spec in (None, *IMAGE_SPECS):
            pipe = Pipeline().stream(path).decode(spec).map(str)
            errors.append(quietly(list, pipe.loader(workers=0)))
        errors.append(quietly(list, Pipeline().stream(path).batched(2).build()))
    pipe = Pipeline().stream(shards).split_by_worker().decode("rgb8", only="pkl pickle pth npz torch.pth").map(str)
    errors.append(quietly(list, pipe.loader(workers=1, start_method="fork")))
    return errors


def list_everything(folder: Path) -> list[str]:
    """Index, list and read the shards of payloads. Returns the errors."""
    from wdskit import LocalShard

    errors = [command("index", folder / "shards")]
    errors += [command(*words, folder / "shards") for words in (["info"], ["info", "--json"])]
    for path in sorted((folder / "shards").glob("*.tar")):
        errors += [command("info", path), command("info", "--json", path)]
        with LocalShard(path) as shard:
            errors += [quietly(bytes, data) for at in (0, 1) for data in shard[at].values()]
    return errors


def pack_everything(folder: Path) -> list[str]:
    """Pack folders, tables and rows that contain payloads and commands. Returns the errors."""
    import wdskit

    (folder / "photos" / "a").mkdir(parents=True)
    for field, data in payloads(folder).items():
        (folder / "photos" / "a" / f"{field.replace('.', '_')}.jpg").write_bytes(data)
    rows = [{"image": "photos/a/pkl.jpg", "text": text} for text in commands(folder)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "rows.csv").write_text("key,text\n" + "".join(f'{at},"{row["text"]}"\n' for at, row in enumerate(rows)))
    errors = []
    for number, source in enumerate(("photos", "rows.jsonl", "rows.csv")):
        errors.append(command("pack", "--skip-bad", folder / source, folder / "packed" / f"p{number}"))
    for field, data in payloads(folder).items():
        values = (data, Canary(folder / f"{MARK}.row"), [Canary(folder / f"{MARK}.row")])
        rows = [[{"__key__": "k", field: value}] for value in values]
        errors += [quietly(wdskit.pack, row, folder / "packed" / f"{field}.rows") for row in rows]
    return errors


def load_everything(folder: Path) -> list[str]:
    """Load configurations that name commands, import paths and objects; run each valid one. Returns the errors."""
    from shards import write_shard

    from wdskit import make_loader

    write_shard(folder / "a.tar", {"k": {"cls": b"1"}})
    (folder / f"{MARK}_module.py").write_text(f"open({str(folder / (MARK + '.module'))!r}, 'w').close()\n")
    errors = []
    for text in configs(folder):
        (folder / "config.yaml").write_text(text)
        errors.append(quietly(lambda: list(make_loader(folder / "config.yaml", workers=0))))
    return errors


def name_everything(folder: Path) -> list[str]:
    """Pass texts for a shell or Python as shards, functions, overrides, sources and folders. Returns the errors."""
    from shards import write_shard

    from wdskit import Pipeline, make_loader

    write_shard(folder / "a.tar", {"k": {"cls": b"1"}})
    (folder / "config.yaml").write_text("version: 1\npipeline: [{stream: a.tar}]")
    errors = []
    for text in commands(folder):
        stages = [{"stream": "a.tar"}, {"map": text}]
        errors.append(quietly(make_loader, {"pipeline": stages}, workers=0))
        errors.append(quietly(make_loader, {"pipeline": stages[:1]}, overrides=[f"pipeline.stream={text}"], workers=0))
        errors.append(quietly(lambda text=text: list(Pipeline().stream(text).build())))
        errors.append(command("config", "show", "config.yaml", "--set", f"pipeline.stream={text}"))
        errors += [command(word, text) for word in ("index", "info")]
        errors.append(command("pack", text, folder / "packed" / "c"))
    return errors


def decode_with_pickle() -> None:
    """Let wdskit unpickle fields called `pkl`, as webdataset does."""
    from wdskit.codecs import fields

    fields._DECODERS["pkl"] = pickle.loads


def open_with_a_shell() -> None:
    """Let `pipe:` run its command, as in webdataset."""
    import subprocess

    from wdskit.dataset import patterns

    check = patterns.scheme_of

    def run(url: str) -> str:
        if url.lower().startswith("pipe:"):
            subprocess.run(url[5:], shell=True, check=False)
        return check(url)

    patterns.scheme_of = run


def map_by_import_path() -> None:
    """Let wdskit import a name that is not registered."""
    import importlib

    from wdskit.stages.base import Context

    resolve = Context.resolve

    def look_up(self: Context, stage: str, fn: object, settings: dict | None = None) -> object:
        by_path = isinstance(fn, str) and fn.startswith(MARK)
        return importlib.import_module(fn) if by_path else resolve(self, stage, fn, settings)

    Context.resolve = look_up


RUNS: dict[str, tuple[Callable[[], None], list[Callable[[Path], list[str]]]]] = {
    "plain": (int, [decode_everything, list_everything, pack_everything, load_everything, name_everything]),
    "decode_with_pickle": (decode_with_pickle, [decode_everything]),
    "open_with_a_shell": (open_with_a_shell, [name_everything]),
    "map_by_import_path": (map_by_import_path, [load_everything]),
}
"""For each run, a change of wdskit and the parts to run after it. "plain" changes nothing; changes are permanent."""


def main_of_script(folder: Path) -> None:
    """Do all runs, each in its own folder, and print the results as JSON."""
    import torch  # noqa: F401 (builds for CUDA start ldconfig at import)

    os.environ["EVIL"] = f"touch {folder / (MARK + '.env')}"
    watch = Watch()
    watch.on = True
    results = {}
    for name, (change, parts) in RUNS.items():
        work = folder / name
        work.mkdir()
        os.chdir(work)
        sys.path.insert(0, str(work))
        change()
        watch.events = []
        errors = [error for part in parts for error in part(work)]
        fired = sorted(path.name for path in folder.rglob(f"{MARK}.*"))
        results[name] = {"events": sorted(set(watch.events)), "fired": fired, "errors": sorted(set(errors))}
        for path in folder.rglob(f"{MARK}.*"):
            path.unlink()
    print(json.dumps(results))


if __name__ == "__main__":
    main_of_script(Path(sys.argv[1]))
