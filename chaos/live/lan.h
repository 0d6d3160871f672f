/* lan.h - hosts on a network of the test's own: namespaces on a bridge, and what goes wrong between them.
 *
 * The test itself moves to the namespace of the bridge (LAN_HUB), so that a store or an observer there is reached by all
 * hosts and by nobody else. All names hold the test's pid. Everything is removed by lan_close, or by a keeper when the test
 * dies. Failure of a command fails the test. */
#ifndef CHAOS_LIVE_LAN_H
#define CHAOS_LIVE_LAN_H

#include "tests/integration/rig.h"

#define LAN_HUB "10.77.0.1"

enum { LAN_HOSTS = 16, LAN_ANY = -1 };
enum lan_way { LAN_IN = 1, LAN_OUT = 2, LAN_BOTH = 3 };

/* NULL, or why there can be no such network here. */
const char *lan_missing(void);
void lan_open(struct rig *r, unsigned hosts);
void lan_close(void);
/* Its namespace, for struct rig_server and worker_netns; HOST:0 for --listen. */
const char *lan_name(unsigned host);
const char *lan_listen(unsigned host);
/* Packets between `host` and `peer` (another host's number, LAN_ANY: everybody else; LAN_HOSTS: the hub) are dropped, those that
 * `host` receives, sends, or both. */
void lan_cut(struct rig *r, unsigned host, int peer, enum lan_way way);
/* That many percent of what the host receives and sends is lost. */
void lan_lose(struct rig *r, unsigned host, unsigned percent);
/* Everything arrives again. */
void lan_heal(struct rig *r, unsigned host);

#endif
