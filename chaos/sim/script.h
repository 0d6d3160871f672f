/* script.h - the simulator's world told step by step: for tests/scenario.
 *
 *     struct world *w = script_begin((struct script){ .servers = 2, .members = 3 });
 *     script_until_step(w, 3);                  // everybody finished step 3
 *     script_kill_member(w, 2);
 *     script_end(w);                            // heals, runs to the end, checks every invariant
 *
 * Nothing is random but small delays: the same script gives the same run. A script that waits for something that
 * does not come within a minute of virtual time fails the run; w->failed and w->why say so. */
#ifndef SIM_SCRIPT_H
#define SIM_SCRIPT_H

#include "chaos/sim/sim.h"

struct script {
    uint32_t servers, loops, members, shards, tensors;   /* 0: 1, 1, 2, 4, 2 */
    struct mode mode;              /* kind 0: synchronous */
    bool in_memory;                /* no durability */
    uint32_t compute_ms;           /* of a step, about; 0: 2 */
};
struct world *script_begin(struct script s);
void script_run_ms(struct world *w, uint64_t ms);
bool script_until(struct world *w, bool (*holds)(const struct world *w, void *arg), void *arg);
bool script_until_step(struct world *w, int64_t step);               /* somebody finished it (async: ended it) */
bool script_until_moment(struct world *w, enum fault_trigger t);     /* it comes once more */
bool script_until_listed(struct world *w, uint32_t member);          /* in the committed view, and alive there */
bool script_until_removed(struct world *w, uint32_t member);
/* Until this member has pushed something in its step, which is at least `step`, and has not ended it. */
bool script_until_half_pushed(struct world *w, uint32_t member, int64_t step);

struct proc *script_member(struct world *w, uint32_t index);         /* lives are counted from 0 */
struct proc *script_server(struct world *w, uint32_t machine);       /* NULL: down */
struct proc *script_leader(struct world *w);
void script_kill_member(struct world *w, uint32_t index);
void script_kill_server(struct world *w, struct proc *p);            /* it restarts by itself */
/* Everything that servers send to this member waits; nothing breaks. */
void script_stall(struct world *w, uint32_t member, uint64_t ms);
/* Faults are over; to the end with every check; returns 0, or 1 when the run failed (a line on stdout says why). */
int script_end(struct world *w);

#endif
