"""Three hospitals and a server, each a process of its own, and one hospital is lost on the way.

``python run.py --out DIR`` makes what separate machines would have, each in a folder of its own
(``DIR/server``, ``DIR/aachen``, ``DIR/bergen``, ``DIR/cork``), and runs the commands that would be
typed there: keys are made and exchanged, every hospital says what it agrees to, connections are
encrypted, and the server lets in only nodes whose keys it knows. Half way through, in the middle of
the second of two sums, Cork is killed (SIGKILL). The others go on without it: two are enough to
open a sum that three have begun. What Cork was charged stays charged.

The same for separate machines is in README.md beside this file. The records are made up.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

HOSPITALS = ("aachen", "bergen", "cork")
LOST = "cork"
COMMAND = Path(sys.executable).with_name("secure-fedclust")

# What is run: the server's operator writes it, and the hospitals have agreed on it before.
SERVER = """\
algorithm = "FKM"

[parameters]
n_clusters = 3
n_rounds = 1                    # one sum to begin with, and one a round
random_state = 0

[privacy]
epsilon = 1.0
delta = 1e-5
ranges = [[0, 120], [10, 60]]   # of the columns below, in their order
protection = "masking"          # the server sees sums over hospitals, and no hospital's own answer
min_survivors = 2               # hospitals that must be in a sum
colluders = 1                   # hospitals that may be on the server's side

[data]
columns = ["age", "bmi"]

[server]
address = "127.0.0.1:{port}"
keys = "keys"
timeout = 10                    # seconds that a hospital has for an answer
"""

# Where the server is, and what a hospital has.
CLIENT = """\
server = "127.0.0.1:{port}"
certificate = "ca.pem"          # from the server's operator
keys = "keys"
ledger = "ledger.sqlite"
policy = "policy.toml"

[data.ranges]                   # what the columns can be, known without looking at the records
age = [0, 120]
bmi = [10, 60]
"""

# What a hospital agrees to, whatever a server asks for: its data-protection officer writes it.
POLICY = """\
max_epsilon = 1.0
max_delta = 1e-5
protocols = ["FKM"]
protections = ["masking"]
min_cohort = 2
max_cohort = 3
"""


def main() -> None:
    """Prepare, run, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    out = parser.parse_args().out
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty: give a new folder")
    prepare(out, free_port())
    code = run(out)
    if code:
        sys.exit(f"the server has ended with exit code {code}; its log is {out / 'server' / 'log'}")
    show(out)


def prepare(out: Path, port: int) -> None:
    """Do what every organisation does once."""
    server = out / "server"
    typed("keys", "init", server / "keys", "--host", "127.0.0.1")
    (server / "server.toml").write_text(SERVER.format(port=port))
    for hospital in HOSPITALS:
        folder = out / hospital
        typed("keys", "init", folder / "keys", "--name", hospital)
        typed("ledger", "init", folder / "ledger.sqlite", "--epsilon", 3, "--delta", 1e-5)
        (folder / "client.toml").write_text(CLIENT.format(port=port))
        (folder / "policy.toml").write_text(POLICY)
        make_records(folder / "records.csv", hospital)
        # Two files change hands. Between machines, by a way that both trust: whoever could swap
        # them could pass for the hospital, or for the server. The fingerprints that the commands
        # print are there to be compared by telephone.
        typed("keys", "register", folder / "keys" / f"{hospital}.card", "--keys", server / "keys")
        shutil.copy(server / "keys" / "ca.pem", folder)


def run(out: Path) -> int:
    """Start all four, lose one of them half way, and wait for the server's end."""
    folder = out / "server"
    with ExitStack() as running:
        log = running.enter_context((folder / "log").open("w"))
        server = start(running, "server", folder / "server.toml", "--out", folder / "out")
        hospitals: dict[str, subprocess.Popen[str]] = {}
        begun = 0
        for line in server.stdout or ():
            log.write(line)
            print("server:", line.rstrip())
            if "listening on" in line:
                hospitals = {name: start_hospital(running, out / name) for name in HOSPITALS}
            begun += "masking/advertise" in line  # the first of four exchanges that make a sum
            if begun == 2 and hospitals[LOST].poll() is None:
                hospitals[LOST].kill()
                hospitals[LOST].wait()
                print(f"{LOST} is killed")
        code = server.wait()
        for name in set(hospitals) - {LOST} if code == 0 else ():
            hospitals[name].wait(timeout=30)  # they were started with --once
        return code


def show(out: Path) -> None:
    """Who was in each sum, and what everybody has now."""
    result = json.loads((out / "server" / "out" / "result.json").read_text())
    print("\nwho was in each sum that the server has seen:")
    for number, each in enumerate(result["sums"], start=1):
        print(f"  {number}: {', '.join(each['survivors'])}")
    print("centres (age, bmi):")
    for center in sorted(result["centers"]):
        print("  " + ", ".join(f"{value:.1f}" for value in center))
    print("what each hospital has:")
    for hospital in HOSPITALS:
        folder = out / hospital
        ledger = json.loads(typed("ledger", "show", folder / "ledger.sqlite", "--json"))
        (spent,) = ledger["clients"]
        labels = folder / "out" / result["federation"]["run"] / "labels.csv"
        has = labels if labels.exists() else "no labels: it was not there at the end"
        print(f"  {hospital}: epsilon {spent['epsilon spent']:.3f} of {ledger['epsilon']:g}; {has}")
    print(f"report: {out / 'server' / 'out' / 'report.html'}")


def typed(*words: object) -> str:
    """Run a command to its end, as one would in a terminal; what it prints."""
    command = [str(COMMAND), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def start(running: ExitStack, *words: object, log: Path | None = None) -> subprocess.Popen[str]:
    """Start a command that goes on; it is ended, whatever happens, when `running` is."""
    output = subprocess.PIPE if log is None else running.enter_context(log.open("w"))
    command = [str(COMMAND), *map(str, words)]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    running.enter_context(process)  # waits for it, after
    running.callback(process.kill)  # this, which does nothing if it has ended
    return process


def start_hospital(running: ExitStack, folder: Path) -> subprocess.Popen[str]:
    """Start a hospital's client, which ends after one run."""
    words = ["--data", folder / "records.csv", "--config", folder / "client.toml", "--once"]
    return start(running, "client", *words, "--out", folder / "out", log=folder / "log")


def make_records(path: Path, hospital: str) -> None:
    """Write 2,000 made-up patients; columns have names, so that their order does not matter."""
    rng = np.random.default_rng(HOSPITALS.index(hospital))
    centers = np.array([[30.0, 20.0], [50.0, 30.0], [80.0, 25.0]])
    records = rng.normal(centers[rng.integers(3, size=2000)], [4.0, 1.5])
    columns = ["age", "bmi"]
    if hospital == "bergen":
        columns, records = columns[::-1], records[:, ::-1]
    lines = [",".join(columns), *(f"{first:.1f},{second:.1f}" for first, second in records)]
    path.write_text("\n".join(lines) + "\n")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
