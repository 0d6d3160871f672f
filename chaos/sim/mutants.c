/* mutants.c - takes one guard out of the cores at a time, and looks for a seed that notices. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include "base/mutant.h"

#ifdef KEEPSTEP_MUTANTS
struct mutant {
    int number;
    const char *name;
    uint32_t replicas, mode;      /* where it shows soonest, unless the caller chooses: 1 + R, mode; 0: any */
};
static const struct mutant mutants[] = {
    { 1, "no change of the view after an election" },
    { 2, "gone members are in steps up to the greatest complete step" },
    { 3, "members that left before keep their last step" },
    { 4, "older ballots are accepted" },
    { 5, "the gone are cut off only after the report" },
    { 6, "a new PREPARE on the same base while a view may have been written" },
    { 7, "joiners join at the least step reported" },
    { 8, "the view is written without its guards" },
    { 9, "reports of older rounds are accepted" },
    { 10, "pushes are not deduplicated" },
    { 11, "results are released before they are durable" },
    { 12, "a step is marked before its results are durable" },
    { 13, "DONE counts although pushes are missing" },
    { 14, "frames of the cut off and the unlisted are accepted" },
    { 15, "frames of newer epochs are not parked" },
    { 16, "the value before is not restored when a step is reopened" },
    { 17, "the cap for joiners is ignored" },
    { 18, "what members said stays when a complete step is reopened", 1, MODE_SYNC },
    { 19, "async: pushes are not deduplicated" },
    { 20, "async: pushes are acknowledged before they are durable" },
    { 21, "SSP: pulls do not wait for the bound" },
    { 22, "SSP: after a restart the least clock is that of whom it knows" },
    { 23, "SSP: the least clock may fall", 1, MODE_SSP },
    { 24, "what a reopened step drops stays on disk" },
    { 25, "frames of before this tenure are accepted", 2, MODE_ASYNC },
    { 30, "members take results of before their set changed", 0, MODE_SYNC },
    { 31, "members finish without COMPLETE of every shard" },
    { 32, "members keep results when their set changed" },
    { 33, "members do not push again to a new tenure" },
    { 34, "members send the clock before what is unacknowledged" },
    { 40, "the gone are in steps up to what a primary that gives the shard away has", 2, MODE_SYNC },
    { 41, "joiners that have not everything count for the step of new members", 2, MODE_SYNC },
    { 42, "joiners become backups before they have everything" },
    { 43, "a joiner becomes the primary" },
    { 44, "a new primary is said to serve for as long as the one before" },
    { 45, "backups need not report" },
    { 46, "a disk that is back goes before living backups", 2, 0 },
    { 50, "a step is marked before backups have its results", 3, MODE_SYNC },
    { 51, "a promoted backup announces before the others have its mark" },
    { 52, "who is named the next primary takes more from the old one", 3, 0 },
    { 53, "frames of servers count in any epoch", 3, MODE_SYNC },
    { 54, "DONE of before this tenure counts", 2, MODE_SYNC },
    { 55, "a first value is pulled before it is held", 3, 0 },
    { 56, "a record says a clock whose pushes do not go before it", 2, MODE_SSP },
    { 57, "a joiner that has everything is not waited for" },
    { 58, "one backup of two is enough" },
    { 59, "a joiner's versions are compared by their steps", 3, 0 },
    { 60, "a promoted backup takes its results for safe", 3, MODE_SYNC },
    { 61, "backups report steps that are not complete", 2, MODE_SYNC },
    { 62, "a joiner that has everything has it of the next primary, too" },
    { 63, "a gradient is applied to any version" },
    { 64, "a promoted backup waits for clocks to know that asynchronous steps are over", 2, MODE_SSP },
    { 65, "acknowledgements of older images count" },
    { 66, "backups do not take settings" },
    { 67, "backups are not told where synchronous steps begin", 2, MODE_SSP },
    { 68, "frames behind one that closed its connection count", 2, MODE_SSP },
    { 69, "a primary sends nothing again on a new connection" },
};

/* No seed is expected to notice these: why, or that nobody knows yet. */
static const struct {
    int number;
    const char *why;
} survivors[] = {
    { 4, "a deposed leader's PREPARE would have to arrive between a report and the view, a few ms" },
    { 11, "the mark follows the results to the disk in order, and nobody is shown a result before COMPLETE" },
    { 18, "facts are cleared when a step completes, and a DONE of the next one seals it: there are none to keep" },
    { 23, "a joiner's clock is above every W reported, and clocks only rise" },
    { 25, "no member could have sent to a tenure before it began, but for a shard that came back" },
    { 41, "open: not shown by 2,000 seeds" }, { 46, "open: not shown by 2,000 seeds" },
    { 52, "open: not shown by 2,000 seeds" }, { 53, "open: not shown by 2,000 seeds" },
    { 56, "open: a seed showed it in an earlier build" }, { 64, "open: a seed showed it in an earlier build" },
    { 67, "open: a seed showed it in an earlier build" }, { 68, "open: a seed showed it in an earlier build" },
    { 61, "open: not shown by 2,000 seeds" },
    { 1, "rare: about one seed in ten thousand" },
    { 24, "rare: about one seed in ten thousand of synchronous ones without replicas" },
};

static const char *survives(int number)
{
    for (size_t i = 0; i < sizeof survivors / sizeof *survivors; i++)
        if (survivors[i].number == number)
            return survivors[i].why;
    return NULL;
}

static bool hunt(const struct sim_options *o, const struct mutant *m, uint64_t seeds)
{
    struct sim_options options = *o;
    struct sim_stats stats;
    struct sim_result r;
    if (!options.replicas)
        options.replicas = m->replicas;
    if (!options.mode)
        options.mode = m->mode;
    mutant_now = m->number;
    for (uint64_t i = 0; i < seeds; i++) {
        options.seed = o->seed + i;
        sim_run(&options, &stats, &r);
        if (!r.failed)
            continue;
        mutant_now = 0;
        printf("%4d  %-78s seed %-6lu %.100s\n", m->number, m->name, (unsigned long)options.seed, r.why);
        fflush(stdout);
        return true;
    }
    mutant_now = 0;
    if (survives(m->number))
        printf("%4d  %-78s survives: %s\n", m->number, m->name, survives(m->number));
    else
        printf("%4d  %-78s SURVIVES %lu seeds\n", m->number, m->name, (unsigned long)seeds);
    fflush(stdout);
    return false;
}

int mutants_run(const struct sim_options *o, uint64_t seeds, int only)
{
    uint32_t n = 0, caught = 0, missed = 0;
    for (size_t i = 0; i < sizeof mutants / sizeof *mutants; i++) {
        if (only && mutants[i].number != only)
            continue;
        n++;
        bool noticed = hunt(o, &mutants[i], seeds);
        caught += noticed;
        missed += !noticed && !survives(mutants[i].number);
    }
    printf("%u of %u mutants caught, %u missed\n", caught, n, missed);
    return missed ? 1 : 0;
}
#else
int mutants_run(const struct sim_options *o, uint64_t seeds, int only)
{
    (void)o, (void)seeds, (void)only;
    fprintf(stderr, "sim: --mutants needs a build with -DKEEPSTEP_MUTANTS (make mutants)\n");
    return 2;
}
#endif
