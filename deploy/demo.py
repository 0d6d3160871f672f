#!/usr/bin/env python3
"""Trains on handwritten digits with two servers and four workers, as processes of this host, once per mode:
sync, ssp:3, async. In each run a worker and a server are killed (SIGKILL); another worker joins, and the server
starts again on its data directory. At the end every worker's own count of what was acknowledged is compared with
what the servers hold: nothing may be lost, nothing applied twice, and the model must be right for 95 % of the
digits that it has not seen. Exit status 0 only then.

    demo.py [--build build] [--coord local|etcd] [--steps 300] [--modes sync,ssp:3,async]
"""
import argparse
import ctypes
import json
import os
import random
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

SERVERS, WORKERS, LEDGERS = 2, 4, 8
RUN_SECONDS = 60
ACCURACY = 0.95
libc = ctypes.CDLL(None)


class Failed(Exception):
    pass


def die_with_parent():
    PR_SET_PDEATHSIG = 1
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Processes:
    """Children in sessions of their own: Ctrl-C reaches them through us, and nothing outlives us."""

    def __init__(self, place):
        self.place, self.all = place, []

    def start(self, name, argv, env=None, stdout=None):
        log = open(os.path.join(self.place, name + ".log"), "ab")
        p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout or log, stderr=log, start_new_session=True,
                             preexec_fn=die_with_parent, env={**os.environ, **(env or {})})
        log.close()
        p.name = name
        self.all.append(p)
        return p

    def last_words(self, name):
        with open(os.path.join(self.place, name + ".log"), errors="replace") as f:
            lines = f.read().split("\n")
        return next((x for x in reversed(lines) if x), "it said nothing")

    def ended_badly(self, p):
        how = f"killed by signal {-p.returncode}" if p.returncode < 0 else f"status {p.returncode}"
        return Failed(f"{p.name} ended ({how}): {self.last_words(p.name)}")

    def stop(self, some, seconds=10):
        for p in some:
            if p.poll() is None:
                p.terminate()
        for p in some:
            try:
                p.wait(seconds)
            except subprocess.TimeoutExpired:
                raise Failed(f"{p.name} did not end within {seconds} s after SIGTERM") from None

    def kill_all(self):
        for p in self.all:
            if p.poll() is None:
                p.kill()
                p.wait()


class Screen:
    """One line that is redrawn on a terminal; elsewhere a line now and then."""

    def __init__(self):
        self.tty, self.last, self.shown = sys.stdout.isatty(), 0, False

    def live(self, text):
        now = time.monotonic()
        if now - self.last < (0.1 if self.tty else 1.0):
            return
        self.last = now
        if self.tty:
            width = shutil.get_terminal_size().columns
            sys.stdout.write("\r\033[K" + text[:width - 1])
            self.shown = True
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def line(self, text):
        sys.stdout.write(("\r\033[K" if self.shown else "") + text + "\n")
        self.shown = False
        sys.stdout.flush()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def etcd_answers(url):
    try:
        with urllib.request.urlopen(url + "/health", timeout=1) as r:
            return json.load(r).get("health") == "true"
    except (OSError, ValueError):
        return False


def start_etcd(processes):
    """On free ports; somebody may take one before etcd does, so it gets three tries."""
    for attempt in range(3):
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        p = processes.start("etcd", ["etcd", "--name", "demo", "--data-dir", os.path.join(processes.place, f"etcd-{attempt}"),
                                     "--listen-client-urls", client, "--advertise-client-urls", client,
                                     "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                                     "--initial-cluster", f"demo={peer}", "--log-level", "error"])
        deadline = time.monotonic() + 15
        while p.poll() is None and time.monotonic() < deadline:
            if etcd_answers(client):
                return "etcd:" + client
            time.sleep(0.05)
        processes.stop([p])
    raise Failed("etcd does not start: " + processes.last_words("etcd"))


class Run:
    """One mode: servers, workers, what happens to them, and the accounts at the end."""

    def __init__(self, demo, mode):
        self.demo, self.mode, self.processes, self.screen = demo, mode, demo.processes, demo.screen
        self.tag = mode.replace(":", "")
        self.job = "digits-" + self.tag
        self.place = os.path.join(demo.processes.place, self.tag)
        os.mkdir(self.place)
        self.selector = selectors.DefaultSelector()
        self.servers, self.workers, self.doomed = {}, {}, set()
        self.newest, self.sizes, self.notes = {}, [], []
        self.step = self.staleness = 0
        self.loss = self.accuracy = float("nan")
        self.finals = {}

    def environment(self, name):
        return {"KEEPSTEP_COORD": self.demo.coord, "KEEPSTEP_JOB": self.job, "KEEPSTEP_TOKEN": self.demo.token,
                "KEEPSTEP_NAME": name, "KEEPSTEP_TIMEOUT": "30"}

    # ---- processes ----

    def start_server(self, i):
        name = f"s{i}"
        ready = os.path.join(self.place, name + ".ready")
        if os.path.exists(ready):
            os.unlink(ready)
        self.servers[name] = self.processes.start(
            f"{self.tag}-{name}",
            [self.demo.keepstep, "server", "--servers", str(SERVERS), "--members", str(WORKERS), "--mode", self.mode,
             "--durability", "write", "--data", os.path.join(self.place, name), "--listen", "127.0.0.1:0",
             "--loops", "2", "--ready-file", ready], self.environment(name))
        return ready

    def wait_ready(self, files):
        deadline = time.monotonic() + 20
        while not all(os.path.exists(f) and os.path.getsize(f) for f in files):
            self.look_at_servers()
            if time.monotonic() > deadline:
                raise Failed("the servers do not serve after 20 s")
            time.sleep(0.01)

    def start_worker(self, i):
        name = f"w{i}"
        p = self.processes.start(
            f"{self.tag}-{name}",
            [self.demo.digits, "--data", self.demo.data, "--steps", str(self.demo.steps), "--every", "1", "--seed", "3",
             "--pause", str(self.demo.pause), "--slot", str(i), "--ledger", self.account_file(i)],
            self.environment(name), subprocess.PIPE)
        os.set_blocking(p.stdout.fileno(), False)
        p.left = b""
        self.workers[name] = p
        self.selector.register(p.stdout, selectors.EVENT_READ, (name, p))

    def account_file(self, i):
        return os.path.join(self.place, f"w{i}.account")

    def kill(self, table, name):
        p = table[name]
        self.doomed.add(p)
        p.kill()
        p.wait()

    def look_at_servers(self):
        for p in self.servers.values():
            if p not in self.doomed and p.poll() is not None:
                raise self.processes.ended_badly(p)

    # ---- progress ----

    def read(self, name, p):
        data = p.stdout.read()
        if data == b"" or data is None and p.poll() is not None:
            self.selector.unregister(p.stdout)
            p.stdout.close()
            if p.wait() and p not in self.doomed:
                raise self.processes.ended_badly(p)
            return
        *lines, p.left = (p.left + (data or b"")).split(b"\n")
        for line in lines:
            self.take(name, json.loads(line))

    def take(self, name, report):
        self.newest[name] = report
        self.step = max(self.step, report["step"])
        self.staleness = max(self.staleness, report["staleness_max"])
        if report.get("final"):
            self.finals[name] = report
        if not self.finals and (not self.sizes or self.sizes[-1] != report["size"]):
            # Reports of one view arrive over a moment: only what is newer than the view before counts.
            if report["epoch"] >= getattr(self, "epoch", 0):
                self.epoch = report["epoch"]
                self.sizes.append(report["size"])
        self.loss, self.accuracy = report["loss"], report["accuracy"]

    def show(self):
        size = self.sizes[-1] if self.sizes else 0
        self.screen.live(f"{self.mode:5} {self.step:4}/{self.demo.steps}  loss {self.loss:5.3f}  "
                         f"accuracy {100 * self.accuracy:4.1f} %  workers {size}  staleness {self.staleness}"
                         + ("  " + self.notes[-1] if self.notes else ""))

    def note(self, text):
        self.notes.append(text)
        self.screen.line(f"{self.mode:5} {self.step:4}/{self.demo.steps}  {text}")

    def happen(self, plan):
        while plan and self.step >= plan[0][0] * self.demo.steps:
            plan.pop(0)[1]()

    def lose_worker(self):
        # Anywhere in its step: while it computes, pushes, waits.
        time.sleep(random.uniform(0, 0.03))
        self.kill(self.workers, "w1")
        self.note("w1 killed")

    def join_worker(self):
        self.start_worker(WORKERS)
        self.note(f"w{WORKERS} starts and joins")

    def lose_server(self):
        self.kill(self.servers, "s0")
        self.note("server s0 killed")
        self.start_server(0)
        self.note("server s0 starts again on its disk")

    def train(self):
        plan = [(0.25, self.lose_worker), (0.45, self.join_worker), (0.65, self.lose_server)]
        deadline = time.monotonic() + RUN_SECONDS
        while self.selector.get_map():
            for key, _ in self.selector.select(0.2):
                self.read(*key.data)
            self.look_at_servers()
            self.happen(plan)
            self.show()
            if time.monotonic() > deadline:
                raise Failed(f"step {self.step} after {RUN_SECONDS} s; {self.waiting()}")
        if plan:
            raise Failed(f"the workers ended at step {self.step}, before everything had happened")

    def waiting(self):
        r = subprocess.run([self.demo.keepstep, "status", "--json"], env={**os.environ, **self.environment("demo")},
                           capture_output=True, text=True, timeout=10)
        try:
            waits = json.loads(r.stdout)["waiting"]
            return "; ".join(f"waiting {w['seconds']:.0f} s for {w['for']}" for w in waits) or "nobody waits"
        except (ValueError, KeyError):
            return r.stderr.strip() or "no status"

    # ---- the accounts ----

    def audit(self):
        """What the servers hold: the ledger of each worker, and the model's accuracy."""
        p = self.processes.start(f"{self.tag}-audit", [self.demo.digits, "--data", self.demo.data, "--seed", "3",
                                                       "--audit", "1"], self.environment("audit"), subprocess.PIPE)
        try:
            out, _ = p.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            raise Failed(f"the audit does not end; {self.waiting()}") from None
        if p.returncode:
            raise self.processes.ended_badly(p)
        ledger, model = (json.loads(line) for line in out.splitlines())
        return ledger["ledger"], model["accuracy"]

    def account(self, values):
        """Of every worker's life: acknowledged <= held by the servers <= pushed."""
        acked = lost = twice = open_pushes = 0
        for i in range(WORKERS + 1):
            with open(self.account_file(i), "rb") as f:
                counts = struct.unpack(f"{2 * LEDGERS}Q", f.read())
            for k in range(LEDGERS):
                pushed, acknowledged, value = counts[k], counts[LEDGERS + k], values[k][i]
                acked += acknowledged
                lost += max(0, acknowledged - value)
                twice += max(0, value - pushed)
                open_pushes += pushed - acknowledged
        return acked, lost, twice, open_pushes

    def go(self):
        began = time.monotonic()
        self.wait_ready([self.start_server(i) for i in range(SERVERS)])
        for i in range(WORKERS):
            self.start_worker(i)
        self.train()
        values, accuracy = self.audit()
        acked, lost, twice, open_pushes = self.account(values)
        self.processes.stop(list(self.servers.values()))
        self.look_at_servers_ended()
        self.screen.line(f"{self.mode:5} done: accuracy {100 * accuracy:.1f} %")
        return {"mode": self.mode, "accuracy": accuracy, "members": "-".join(map(str, self.sizes)), "acked": acked,
                "lost": lost, "twice": twice, "open": open_pushes, "staleness": self.staleness,
                "seconds": time.monotonic() - began}

    def look_at_servers_ended(self):
        for p in self.servers.values():
            if p.returncode:
                raise self.processes.ended_badly(p)


class Demo:
    def __init__(self, options, processes):
        self.processes, self.screen = processes, Screen()
        self.keepstep = os.path.join(options.build, "keepstep")
        self.digits = os.path.join(options.build, "worker/examples/digits")
        self.data = "tests/data/digits.csv.gz"
        self.steps, self.pause, self.modes = options.steps, options.pause, options.modes.split(",")
        self.token = secrets.token_hex(16)
        self.coord = start_etcd(processes) if options.coord == "etcd" else "local:" + os.path.join(processes.place, "coord")

    def table(self, rows):
        line = self.screen.line
        line("")
        line("mode    accuracy  members      acknowledged  lost  twice  never answered  staleness  seconds")
        for r in rows:
            line(f"{r['mode']:7} {100 * r['accuracy']:6.1f} %  {r['members']:11}  {r['acked']:12,}  {r['lost']:4}  "
                 f"{r['twice']:5}  {r['open']:14}  {r['staleness']:9}  {r['seconds']:7.1f}")
        line("")
        line(f"In each run: {SERVERS} servers (durability=write), {WORKERS} workers; w1 killed, w{WORKERS} joined, server s0 "
             "killed and started again on its disk.")

    def judge(self, rows):
        for r in rows:
            if r["accuracy"] < ACCURACY:
                raise Failed(f"{r['mode']}: accuracy {100 * r['accuracy']:.1f} %, wanted are {100 * ACCURACY:.0f} %")
            if r["lost"] or r["twice"]:
                raise Failed(f"{r['mode']}: {r['lost']} acknowledged updates lost, {r['twice']} applied twice")
            if WORKERS - 1 not in [int(n) for n in r["members"].split("-")]:
                raise Failed(f"{r['mode']}: the members never were {WORKERS - 1}: {r['members']}")

    def go(self):
        rows = []
        for mode in self.modes:
            try:
                rows.append(Run(self, mode).go())
            except Failed as e:
                raise Failed(f"{mode}: {e}") from None
        self.table(rows)
        self.judge(rows)


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--coord", default="local", choices=["local", "etcd"])
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--pause", type=int, default=10, help="milliseconds between a worker's steps")
    p.add_argument("--modes", default="sync,ssp:3,async")
    p.add_argument("--keep", action="store_true", help="leave the directory with logs and data")
    return p.parse_args()


def on_signal(number, _):
    raise SystemExit(128 + number)


def main():
    o = options()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    place = tempfile.mkdtemp(prefix="keepstep-demo-")
    processes = Processes(place)
    try:
        Demo(o, processes).go()
        return 0
    except (Failed, OSError) as e:
        sys.stdout.flush()
        print(f"demo: {e}", file=sys.stderr)
        return 1
    finally:
        processes.kill_all()
        if o.keep:
            print("logs and data are in " + place)
        else:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
