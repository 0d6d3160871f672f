#include "chaos/live/lan.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COMMAND_BYTES = 1024, HUB = LAN_HOSTS };

static struct {
    unsigned hosts;
    int before;                          /* the namespace that the test came from */
    int alive;                           /* the keeper reads its other end */
    pid_t keeper, self;
    char name[LAN_HOSTS + 1][32], listen[LAN_HOSTS][32];
} lan = {.before = -1, .alive = -1};

static bool on_path(const char *program)
{
    const char *path = getenv("PATH");
    char file[512];
    for (const char *at = path ? path : ""; *at; at += strspn(at, ":")) {
        size_t n = strcspn(at, ":");
        snprintf(file, sizeof file, "%.*s/%s", (int)n, at, program);
        if (access(file, X_OK) == 0)
            return true;
        at += n;
    }
    return false;
}

static int run(const char *command)
{
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

const char *lan_missing(void)
{
    char command[COMMAND_BYTES];
    if (geteuid() != 0)
        return "network namespaces need root";
    if (!on_path("ip"))
        return "ip is not on the PATH (Debian: iproute2)";
    if (!on_path("nft"))
        return "nft is not on the PATH (Debian: nftables)";
    snprintf(command, sizeof command,
             "unshare --net sh -c 'ip link add name b type bridge && ip link add v type veth peer name w &&"
             " nft add table inet f && nft add chain inet f i \"{ type filter hook input priority 0; }\" &&"
             " nft add rule inet f i numgen random mod 100 \"<\" 5 drop' 2>/dev/null");
    return run(command) ? "this kernel or container lets nobody make bridges, veth pairs and nft rules in a namespace" : NULL;
}

static void must(struct rig *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void must(struct rig *r, const char *format, ...)
{
    char command[COMMAND_BYTES];
    va_list ap;
    va_start(ap, format);
    vsnprintf(command, sizeof command, format, ap);
    va_end(ap);
    int status = run(command);
    if (status)
        RIG_FAIL(r, "status %d: %s", status, command);
}

static void names_remove(void)
{
    char command[COMMAND_BYTES];
    for (unsigned i = 0; i <= LAN_HOSTS; i++) {
        snprintf(command, sizeof command, "ip netns del %s 2>/dev/null", lan.name[i]);
        if (lan.name[i][0])
            (void)run(command);
    }
}

/* In a session of its own: who ends the test and all that it started does not end this. */
static void keeper_start(struct rig *r)
{
    int end[2];
    RIG_ASSERT(r, pipe2(end, O_CLOEXEC) == 0);
    lan.keeper = fork();
    if (lan.keeper == 0) {
        char byte;
        setsid();
        signal(SIGTERM, SIG_IGN);
        alarm(0);
        for (int fd = 0; fd < 3; fd++)
            close(fd);
        close(end[1]);
        while (read(end[0], &byte, 1) < 0 && errno == EINTR)
            continue;
        names_remove();
        _exit(0);
    }
    close(end[0]);
    lan.alive = end[1];
}

static void host_make(struct rig *r, unsigned i)
{
    const char *name = lan.name[i], *hub = lan.name[HUB];
    must(r, "ip netns add %s", name);
    must(r, "ip -n %s link add v%u type veth peer name eth0 netns %s", hub, i, name);
    must(r, "ip -n %s link set v%u master br0 up", hub, i);
    must(r, "ip -n %s addr add 10.77.0.%u/24 dev eth0 && ip -n %s link set eth0 up && ip -n %s link set lo up", name, 10 + i,
         name, name);
}

static int enter(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int failed = fd < 0 || setns(fd, CLONE_NEWNET);
    close(fd);
    return failed;
}

void lan_open(struct rig *r, unsigned hosts)
{
    char path[64];
    lan.hosts = hosts;
    lan.self = getpid();
    RIG_ASSERT(r, hosts <= LAN_HOSTS);
    for (unsigned i = 0; i < hosts; i++) {
        snprintf(lan.name[i], sizeof lan.name[i], "keepstep%d-%u", (int)lan.self, i);
        snprintf(lan.listen[i], sizeof lan.listen[i], "10.77.0.%u:0", 10 + i);
    }
    snprintf(lan.name[HUB], sizeof lan.name[HUB], "keepstep%d-hub", (int)lan.self);
    keeper_start(r);
    must(r, "ip netns add %s", lan.name[HUB]);
    must(r, "ip -n %s link add br0 type bridge && ip -n %s addr add " LAN_HUB "/24 dev br0 && ip -n %s link set br0 up &&"
         " ip -n %s link set lo up", lan.name[HUB], lan.name[HUB], lan.name[HUB], lan.name[HUB]);
    for (unsigned i = 0; i < hosts; i++) {
        host_make(r, i);
        lan_heal(r, i);
    }
    lan.before = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "/run/netns/%s", lan.name[HUB]);
    RIG_ASSERT(r, lan.before >= 0 && enter(path) == 0);
}

void lan_close(void)
{
    if (!lan.self)
        return;
    if (lan.before >= 0 && setns(lan.before, CLONE_NEWNET))
        abort();
    close(lan.before);
    close(lan.alive);
    if (lan.keeper > 0)
        waitpid(lan.keeper, NULL, 0);
    lan.before = lan.alive = -1;
    lan.keeper = lan.self = 0;
}

const char *lan_name(unsigned host)
{
    return lan.name[host];
}

const char *lan_listen(unsigned host)
{
    return lan.listen[host];
}

static void rule(struct rig *r, unsigned host, const char *chain, const char *text)
{
    must(r, "ip netns exec %s nft add rule inet keepstep %s %s", lan.name[host], chain, text);
}

void lan_cut(struct rig *r, unsigned host, int peer, enum lan_way way)
{
    char in[64] = "drop", out[64] = "drop";
    if (peer != LAN_ANY) {
        unsigned last = peer == HUB ? 1 : 10 + (unsigned)peer;
        snprintf(in, sizeof in, "ip saddr 10.77.0.%u drop", last);
        snprintf(out, sizeof out, "ip daddr 10.77.0.%u drop", last);
    }
    if (way & LAN_IN)
        rule(r, host, "input", in);
    if (way & LAN_OUT)
        rule(r, host, "output", out);
}

void lan_lose(struct rig *r, unsigned host, unsigned percent)
{
    char text[64];
    snprintf(text, sizeof text, "numgen random mod 100 '<' %u drop", percent);
    rule(r, host, "input", text);
    rule(r, host, "output", text);
}

void lan_heal(struct rig *r, unsigned host)
{
    must(r, "ip netns exec %s nft -f - <<'END'\n"
            "flush ruleset\n"
            "table inet keepstep {\n"
            " chain input { type filter hook input priority 0; iif lo accept; }\n"
            " chain output { type filter hook output priority 0; oif lo accept; }\n"
            "}\nEND\n", lan.name[host]);
}
