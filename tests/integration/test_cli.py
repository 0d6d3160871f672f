#!/usr/bin/env python3
"""The keepstep command: usage, errors (one line, not zero), launch, status, stop. BUILD says where it was built."""
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
BUILD = os.path.join(ROOT, os.environ.get("BUILD") or "build")
KEEPSTEP = os.path.join(BUILD, "keepstep")
EXAMPLES = os.path.join(BUILD, "worker", "examples")
DIGITS = [os.path.join(EXAMPLES, "digits"), "--data", os.path.join(ROOT, "tests", "data", "digits.csv.gz")]
SLOWER = 6 if os.environ.get("SAN") else 1
libc = ctypes.CDLL(None)


def die_with_parent():
    libc.prctl(1, signal.SIGKILL)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Cli(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.TemporaryDirectory(prefix="keepstep-cli-")
        self.dir = self.place.name
        self.coord = "local:" + os.path.join(self.dir, "coord")
        self.running = []
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        self.env["TMPDIR"] = os.path.join(self.dir, "tmp")
        os.mkdir(self.env["TMPDIR"])

    def tearDown(self):
        for p in self.running:
            if p.poll() is None:
                p.kill()
            p.wait()
            p.stderr.close()
            p.stdout.close()
        self.assertEqual(os.listdir(self.env["TMPDIR"]), [], "temporary files are left")
        self.place.cleanup()

    # ---- helpers ----

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def keepstep(self, *args, seconds=30, **env):
        return subprocess.run([KEEPSTEP, *args], env={**self.env, **env}, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=seconds * SLOWER)

    def fails(self, status, pattern, *args, **env):
        """One line on stderr, nothing on stdout, this status."""
        r = self.keepstep(*args, **env)
        self.assertEqual(r.returncode, status, r.stderr)
        self.assertEqual(r.stderr.count("\n"), 1, r.stderr)
        self.assertRegex(r.stderr, pattern)
        self.assertTrue(r.stderr.startswith("keepstep"), r.stderr)
        self.assertEqual(r.stdout, "")

    def start(self, *args, **env):
        p = subprocess.Popen([KEEPSTEP, *args], env={**self.env, **env}, stdin=subprocess.DEVNULL, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_parent)
        self.running.append(p)
        return p

    def until(self, what, condition, seconds=30):
        deadline = time.monotonic() + seconds * SLOWER
        while not condition():
            self.assertLess(time.monotonic(), deadline, "still waiting: " + what)
            time.sleep(0.01)

    def server(self, *args, name="s0", **env):
        ready = self.path(name + ".ready")
        p = self.start("server", "--coord", self.coord, "--data", self.path(name), "--name", name, "--loops", "1",
                       "--shards", "8", "--ready-file", ready, *args, **env)
        self.until("server " + name, lambda: p.poll() is not None or os.path.exists(ready) and os.path.getsize(ready))
        self.assertIsNone(p.poll(), p.poll() is not None and p.stderr.read())
        with open(ready) as f:
            return p, f.read().strip()

    def end(self, p, number=signal.SIGTERM):
        p.send_signal(number)
        self.assertEqual(p.wait(20 * SLOWER), 0)

    def status(self, **env):
        r = self.keepstep("status", "--coord", self.coord, "--json", **env)
        return json.loads(r.stdout) if r.stdout else {}

    def begun(self):
        self.until("the first view", lambda: self.status().get("epoch", 0) > 0)

    # ---- usage ----

    def test_help_of_every_command(self):
        for args in (["--help"], ["help"], *([c, "--help"] for c in ("server", "launch", "status", "stop"))):
            r = self.keepstep(*args)
            self.assertEqual((r.returncode, r.stderr), (0, ""), args)
            self.assertRegex(r.stdout, "^Usage: keepstep")
        self.assertRegex(self.keepstep("version").stdout, r"^keepstep \d+\.\d+\.\d+\n$")

    def test_no_command_is_a_usage_error(self):
        self.assertEqual(self.keepstep().returncode, 2)

    def test_unknown_words_name_the_nearest(self):
        self.fails(2, "did you mean 'launch'", "lanch")
        self.fails(2, "unknown command 'xyzzy'", "xyzzy")
        self.fails(2, "unknown option --jop, did you mean --job", "server", "--jop", "x")
        self.fails(2, "did you mean --token-file", "status", "--token", "secret")
        self.fails(2, "did you mean --coord", "stop", "--coor=local:x")
        self.fails(2, "did you mean --restart-workers", "launch", "--restart-worker", "1")
        self.fails(2, "unknown option --qqqqqqq;", "status", "--qqqqqqq")
        self.fails(2, "'extra' is not understood", "status", "extra")

    def test_bad_values(self):
        for args, pattern in ((["--shards", "0"], "--shards is '0'"), (["--shards", "-1"], "--shards"),
                              (["--loops", "many"], "--loops is 'many'"), (["--memory", "4X"], "--memory is '4X'"),
                              (["--memory", "99999999999999999999"], "--memory"), (["--mode", "fast"], "--mode is 'fast'"),
                              (["--durability", "maybe"], "write or none"), (["--deterministic", "yes"], "off or on"),
                              (["--chunk-bytes", "7"], "multiple of 8"), (["--listen", "nowhere"], "HOST:PORT"),
                              (["--job", "a/b"], "--job is 'a/b'"), (["--job"], "--job needs a value"),
                              (["--name", ""], "--name"), (["--wait-for-server", "1.5"], "--wait-for-server")):
            self.fails(2, pattern, "server", "--coord", self.coord, *args)
        self.fails(2, "KEEPSTEP_SHARDS is 'no'", "server", "--coord", self.coord, KEEPSTEP_SHARDS="no")
        self.fails(2, "--json takes no value", "status", "--json=1")
        self.fails(2, "--watch", "status", "--coord", self.coord, "--watch", "0")

    def test_coordination_store_must_be_named(self):
        for command in ("server", "status", "stop"):
            self.fails(2, "--coord is missing", command)
            self.fails(2, "wanted is local:DIR or etcd:", command, "--coord", "zookeeper:x")
            self.fails(2, "KEEPSTEP_COORD is 'local:'", command, KEEPSTEP_COORD="local:")

    def test_token_files(self):
        self.fails(2, "cannot read", "status", "--coord", self.coord, "--token-file", self.path("no"))
        open(self.path("empty"), "w").close()
        self.fails(2, "must hold 1 to", "status", "--coord", self.coord, "--token-file", self.path("empty"))
        self.fails(2, "both set", "status", "--coord", self.coord, KEEPSTEP_TOKEN="a", KEEPSTEP_TOKEN_FILE="b")

    # ---- errors of a server ----

    def test_store_that_does_not_answer(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            url = f"etcd:http://127.0.0.1:{s.getsockname()[1]}"
            self.fails(1, "did not answer within", "server", "--coord", url, "--data", self.path("d"), KEEPSTEP_LOG="off")
            self.fails(1, "does not answer", "status", "--coord", url)
            self.fails(1, "does not answer", "stop", "--coord", url)

    def test_store_that_is_not_there(self):
        self.fails(1, "is not there", "status", "--coord", self.coord)
        self.fails(1, "is not there", "stop", "--coord", self.coord)
        with open(self.path("file"), "w") as f:
            f.write("x")
        self.fails(1, "file", "server", "--coord", "local:" + self.path("file"), "--data", self.path("d"))

    def test_missing_data_directory(self):
        self.fails(1, "give --data DIR", "server", "--coord", self.coord)
        self.fails(1, "No such file", "server", "--coord", self.coord, "--data", self.path("no", "parent"))

    def test_few_descriptors(self):
        for n in (24, 30, 60):
            few = lambda n=n: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))
            p = subprocess.run([KEEPSTEP, "server", "--coord", self.coord, "--data", self.path("few"), "--loops", "2"],
                               capture_output=True, text=True, env=self.env, timeout=30, preexec_fn=few)
            self.assertEqual(p.returncode, 1)
            self.assertRegex(p.stderr, r"^keepstep server: at most \d+ files may be open \(ulimit -n\).*\n$")
        for n in range(7, 16):
            few = lambda n=n: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))
            p = subprocess.run([os.path.join(EXAMPLES, "hello")], capture_output=True, text=True, timeout=30, preexec_fn=few,
                               env=dict(self.env, KEEPSTEP_COORD=self.coord, KEEPSTEP_TIMEOUT="1"))
            self.assertIn(p.returncode, (1, 127), p.stderr)     # 127: too few to load the library

    def test_data_directory_of_another_job(self):
        p, _ = self.server("--job", "one")
        self.end(p)
        self.fails(1, "one", "server", "--coord", self.coord, "--job", "two", "--data", self.path("s0"), "--shards", "8")

    def test_data_directory_in_use(self):
        self.server()
        self.fails(1, "in use|another process|locked", "server", "--coord", self.coord, "--data", self.path("s0"),
                   "--name", "s0", "--loops", "1")

    def test_data_directory_that_is_something_else(self):
        os.mkdir(self.path("photos"))
        with open(self.path("photos", "cat.jpg"), "w") as f:
            f.write("x")
        self.fails(1, "photos", "server", "--coord", self.coord, "--data", self.path("photos"))

    def test_busy_port(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            port = s.getsockname()[1]
            self.fails(1, f"127.0.0.1:{port}.*in use", "server", "--coord", self.coord, "--data", self.path("d"),
                       "--listen", f"127.0.0.1:{port}")

    def test_address_that_is_not_ours(self):
        self.fails(1, "192.0.2.1", "server", "--coord", self.coord, "--data", self.path("d"), "--listen", "192.0.2.1:0")

    def test_job_with_other_settings(self):
        self.server()
        self.fails(1, "created with --shards 8, not 16", "server", "--coord", self.coord, "--data", self.path("d"),
                   "--shards", "16")
        self.fails(1, "created with --durability write", "server", "--coord", self.coord, "--durability", "none")

    def test_ready_file_that_cannot_be_written(self):
        self.fails(1, "cannot write", "server", "--coord", self.coord, "--data", self.path("d"), "--ready-file",
                   self.path("no", "file"))

    def test_job_that_has_ended(self):
        p, _ = self.server()
        self.begun()
        r = self.keepstep("stop", "--coord", self.coord, "--reason", "enough")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertIn("enough", r.stdout)
        self.assertEqual(p.wait(20 * SLOWER), 0)
        self.fails(1, "has ended.*enough", "server", "--coord", self.coord, "--data", self.path("s0"), "--name", "s0")
        r = self.keepstep("stop", "--coord", self.coord, "--purge")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.fails(1, "there is no job 'default'", "stop", "--coord", self.coord)
        self.server(name="again")

    # ---- wrong token ----

    def test_wrong_token(self):
        p, _ = self.server(KEEPSTEP_TOKEN="right", KEEPSTEP_LOG="off")
        self.until("the view", lambda: self.status(KEEPSTEP_TOKEN="right").get("epoch", 0) > 0)
        r = self.keepstep("status", "--coord", self.coord, KEEPSTEP_TOKEN="wrong")
        self.assertEqual(r.returncode, 1)
        self.assertRegex(r.stdout, "s0 .*UNREACHABLE: .*token")
        self.fails(1, "was not stopped: .*token", "stop", "--coord", self.coord, KEEPSTEP_TOKEN="wrong")
        r = subprocess.run([os.path.join(EXAMPLES, "hello")], capture_output=True, text=True, timeout=30 * SLOWER,
                           env={**self.env, "KEEPSTEP_COORD": self.coord, "KEEPSTEP_TOKEN": "wrong", "KEEPSTEP_TIMEOUT": "10"})
        self.assertEqual(r.returncode, 1)
        self.assertRegex(r.stderr, "token")
        self.end(p)

    def test_token_from_a_file(self):
        with open(self.path("token"), "w") as f:
            f.write("right\n")
        p, _ = self.server("--token-file", self.path("token"))
        self.until("the view", lambda: self.status(KEEPSTEP_TOKEN="right").get("epoch", 0) > 0)
        self.assertTrue(self.status(KEEPSTEP_TOKEN_FILE=self.path("token"))["servers"][0]["reachable"])
        self.end(p, signal.SIGINT)

    # ---- a server's life ----

    def test_server_comes_back_on_its_directory(self):
        p, _ = self.server()
        self.begun()
        before = self.status()["servers"][0]["id"]
        p.kill()
        p.wait()
        self.until("the store notices", lambda: not self.status()["servers"][0]["reachable"])
        r = self.keepstep("status", "--coord", self.coord)
        self.assertEqual(r.returncode, 1)
        self.assertIn("UNREACHABLE", r.stdout)
        self.fails(1, "has no server now", "stop", "--coord", self.coord)
        q, _ = self.server()
        self.until("the new life leads", lambda: self.status()["servers"][0]["id"] != before
                   and self.status()["servers"][0]["reachable"])
        self.end(q)

    def test_shards_in_another_directory(self):
        p, _ = self.server()
        self.begun()
        self.end(p)
        self.fails(1, "keeps its shards in another data directory", "server", "--coord", self.coord, "--name", "s0",
                   "--loops", "1", "--data", self.path("other"))

    # ---- status ----

    def test_status_shows_servers_and_members(self):
        self.server("--members", "1")
        w = subprocess.Popen([*DIGITS, "--steps", "100000", "--pause", "5"], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
                             env={**self.env, "KEEPSTEP_COORD": self.coord, "KEEPSTEP_NAME": "gpu-7"})
        try:
            self.until("the member steps", lambda: (self.status().get("members") or [{}])[0].get("clock", -1) > 5)
            s = self.status()
            self.assertEqual(s["members"][0]["name"], "gpu-7")
            self.assertEqual(s["servers"][0]["shards"], 8)
            self.assertGreater(s["members"][0]["pushes"], 0)
            r = self.keepstep("status", "--coord", self.coord)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertRegex(r.stdout, r"job default  epoch \d+  mode sync  durability write  shards 8  leader s0")
            self.assertRegex(r.stdout, r"(?m)^gpu-7 +0 +\d+ +0 ")
            watch = self.start("status", "--coord", self.coord, "--watch", "1")
            self.until("two pictures", lambda: watch.stdout.readline().startswith("job"))
            self.until("two pictures", lambda: watch.stdout.readline().startswith("job"))
            line = next(x for x in iter(watch.stdout.readline, "") if x.startswith(("s0", "gpu-7")))
            self.assertRegex(line, r"^s0 .* [\d.]+K? +[\d.]+[KM] ")
            self.end(watch, signal.SIGINT)
        finally:
            w.terminate()
            self.assertEqual(w.wait(20 * SLOWER), 0, w.stderr.read())
            w.stderr.close()

    def test_status_says_who_is_waited_for(self):
        self.server("--members", "2")
        workers = []
        for name in ("fast", "slow"):
            workers.append(subprocess.Popen([*DIGITS, "--steps", "100000"], stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL, preexec_fn=die_with_parent,
                                            env={**self.env, "KEEPSTEP_COORD": self.coord, "KEEPSTEP_NAME": name}))
        try:
            self.until("both step", lambda: len(self.status().get("members") or []) == 2
                       and self.status()["members"][0]["clock"] > 3)
            workers[1].send_signal(signal.SIGSTOP)
            self.until("status names it", lambda: any(w["for"] == "slow" for w in self.status()["waiting"]))
        finally:
            for w in workers:
                w.kill()
                w.wait()

    # ---- launch ----

    def launch(self, *args, **env):
        return self.keepstep("launch", *args, seconds=60, **env)

    def test_launch_hello(self):
        r = self.launch("-n", "3", "-s", "2", "--", os.path.join(EXAMPLES, "hello"))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(sorted(re.findall(r"\[w(\d)\] rank \d of 3: the sum of ranks is 3\n", r.stdout)), ["0", "1", "2"])
        self.assertRegex(r.stderr, "3 of 3 workers ended well, 0 restarts")

    def test_launch_usage(self):
        self.fails(2, "which program", "launch", "-n", "2")
        self.fails(2, "--workers", "launch", "-n", "0", "--", "true")
        self.fails(2, "needs --coord", "launch", "--no-servers", "--", "true")
        self.fails(2, "neither", "launch", "--no-servers", "-s", "2", "--coord", self.coord, "--", "true")
        self.fails(2, "needs --durability write", "launch", "--durability", "none", "--restart-servers", "1", "--", "true")

    def test_launch_program_that_is_not_there(self):
        r = self.launch("-n", "2", "--", "no-such-program")
        self.assertEqual(r.returncode, 1)
        self.assertIn("cannot run no-such-program: No such file or directory", r.stderr)

    def test_launch_environment(self):
        script = "echo $KEEPSTEP_NAME $KEEPSTEP_INDEX $KEEPSTEP_LAUNCHED $KEEPSTEP_RESTARTS $KEEPSTEP_JOB ${#KEEPSTEP_TOKEN}"
        r = self.launch("-n", "2", "--job", "j", "--", "sh", "-c", script)
        self.assertEqual(sorted(r.stdout.splitlines()), ["[w0] w0 0 2 0 j 32", "[w1] w1 1 2 0 j 32"])

    def test_launch_takes_the_first_bad_status(self):
        r = self.launch("-n", "2", "--", "sh", "-c", "exit $((KEEPSTEP_INDEX * 7))")
        self.assertEqual(r.returncode, 7)
        self.assertIn("w1 ended with status 7", r.stderr)
        r = self.launch("-n", "1", "--", "sh", "-c", "kill -9 $$")
        self.assertEqual(r.returncode, 128 + 9)
        self.assertIn("w0 was killed by SIGKILL", r.stderr)

    def test_launch_restarts_workers_within_the_budget(self):
        r = self.launch("-n", "1", "--restart-workers", "2", "--", "sh", "-c", "test $KEEPSTEP_RESTARTS = 2")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("1 of 1 workers ended well, 2 restarts", r.stderr)
        r = self.launch("-n", "1", "--restart-workers", "2", "--", "sh", "-c", "test $KEEPSTEP_RESTARTS = 3")
        self.assertEqual(r.returncode, 1, r.stderr)

    def test_launch_restarts_a_killed_server(self):
        data = self.path("data")
        p = self.start("launch", "-n", "2", "-s", "2", "--data", data, "--", *DIGITS, "--steps", "150", "--every", "50",
                       "--pause", "5", KEEPSTEP_TOKEN="t")
        self.coord = "local:" + os.path.join(data, "coord")
        look = lambda: self.status(KEEPSTEP_TOKEN="t")
        self.until("some steps", lambda: (look().get("members") or [{}])[0].get("clock", -1) > 10)
        children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(p.pid)], capture_output=True, text=True).stdout
        victim = next(int(line.split()[0]) for line in children.splitlines() if "server --name s1" in line)
        os.kill(victim, signal.SIGKILL)
        out, err = p.communicate(timeout=60 * SLOWER)
        self.assertEqual(p.returncode, 0, err)
        self.assertIn("s1 was killed by SIGKILL: starting it again", err)
        self.assertIn("2 of 2 workers ended well, 1 restarts", err)
        self.assertEqual(out.count('"final":1'), 2)

    def test_launch_ends_when_a_server_is_lost_for_good(self):
        p = self.start("launch", "-n", "1", "--durability", "none", "--data", self.path("data"), "--", "sh", "-c",
                       "echo up; exec sleep 60")
        self.assertEqual(p.stdout.readline(), "[w0] up\n")
        children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(p.pid)], capture_output=True, text=True).stdout
        os.kill(next(int(x.split()[0]) for x in children.splitlines() if "server --name s0" in x), signal.SIGKILL)
        _, err = p.communicate(timeout=30 * SLOWER)
        self.assertEqual(p.returncode, 1, err)
        self.assertIn("s0 was killed by SIGKILL and is not started again", err)

    def test_launch_passes_signals_on(self):
        script = "trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.05; done"
        p = self.start("launch", "-n", "1", "--", "sh", "-c", script)
        self.assertEqual(p.stdout.readline(), "[w0] up\n")
        p.terminate()
        out, err = p.communicate(timeout=30 * SLOWER)
        self.assertEqual((p.returncode, out), (3, "[w0] asked\n"), err)

    def test_launch_second_signal_kills(self):
        p = self.start("launch", "-n", "1", "--", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done")
        self.assertEqual(p.stdout.readline(), "[w0] up\n")
        p.terminate()
        self.assertIn("once more kills", p.stderr.readline())
        p.terminate()
        p.communicate(timeout=30 * SLOWER)
        self.assertEqual(p.returncode, 128 + 9)

    def test_launch_children_die_with_it(self):
        p = self.start("launch", "-n", "1", "--data", self.path("data"), "--", "sh", "-c", "echo $$; exec sleep 60")
        worker = int(p.stdout.readline().split()[1])
        p.kill()
        p.wait()
        self.until("the worker ends", lambda: not alive(worker))

    def test_launch_logs_and_continues(self):
        for steps in ("20", "40"):
            r = self.launch("-n", "2", "--data", self.path("data"), "--log-dir", self.path("logs"), "--", *DIGITS,
                            "--steps", steps)
            self.assertEqual((r.returncode, r.stdout), (0, ""), r.stderr)
        with open(self.path("logs", "w0.log")) as f:
            steps = [json.loads(line)["step"] for line in f]
        self.assertEqual(steps, sorted(steps), "the second run did not go on where the first ended")
        self.assertEqual(steps[-1], 40)

    def test_launch_only_workers(self):
        self.server("--members", "2", KEEPSTEP_TOKEN="t")
        r = self.launch("-n", "2", "--no-servers", "--coord", self.coord, "--", os.path.join(EXAMPLES, "hello"),
                        KEEPSTEP_TOKEN="t")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(r.stdout.count("the sum of ranks is 1"), 2)


if __name__ == "__main__":
    unittest.main()
