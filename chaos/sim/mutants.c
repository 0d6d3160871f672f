/* mutants.c - takes one guard out of the cores at a time, and looks for a seed that notices. */
#include "chaos/sim/sim.h"

#include <stdio.h>
#include "base/mutant.h"

#ifdef KEEPSTEP_MUTANTS
struct mutant {
    int number;
    const char *name;
    enum mode_kind mode;           /* the seeds that may notice; 0: all */
    uint32_t times;                /* rare: so many times the seeds; 0: once */
    const char *survives;          /* why no seed is expected to notice; NULL: one has to */
};
static const struct mutant mutants[] = {
    { 1, "no change of the view after an election", MODE_SYNC, 8, NULL },
    { 2, "gone members are in steps up to the greatest complete step", MODE_SYNC, 0, NULL },
    { 3, "members that left before keep their last step", MODE_SYNC, 0, NULL },
    { 4, "older ballots are accepted", MODE_SYNC, 0,
      "a deposed leader's PREPARE would have to arrive between a report and the view, a few ms" },
    { 5, "the gone are cut off only after the report", MODE_SYNC, 0, NULL },
    { 6, "a new PREPARE on the same base while a view may have been written", MODE_SYNC, 0, NULL },
    { 7, "joiners join at the least step reported", MODE_SYNC, 0, NULL },
    { 8, "the view is written without its guards", MODE_SYNC, 0, NULL },
    { 9, "reports of older rounds are accepted", MODE_SYNC, 0, NULL },
    { 10, "pushes are not deduplicated", MODE_SYNC, 0, NULL },
    { 11, "results are released before they are durable", MODE_SYNC, 0, 
      "the mark follows the results to the disk in order, and nobody is shown a result before COMPLETE" },
    { 12, "a step is marked before its results are durable", MODE_SYNC, 0, NULL },
    { 13, "DONE counts although pushes are missing", MODE_SYNC, 0, NULL },
    { 14, "frames of the cut off and the unlisted are accepted", MODE_SYNC, 2, NULL },
    { 15, "frames of newer epochs are not parked", MODE_SYNC, 0, NULL },
    { 16, "the value before is not restored when a step is reopened", MODE_SYNC, 0, NULL },
    { 17, "the cap for joiners is ignored", MODE_SYNC, 0, NULL },
    { 18, "what members said stays when a complete step is reopened", MODE_SYNC, 0, 
      "facts are cleared when a step completes, and a DONE of the next one seals it: there are none to keep" },
    { 19, "async: pushes are not deduplicated", 0, 0, NULL },
    { 20, "async: pushes are acknowledged before they are durable", MODE_SSP, 0, NULL },
    { 21, "SSP: pulls do not wait for the bound", MODE_SSP, 0, NULL },
    { 22, "SSP: after a restart the least clock is that of whom it knows", MODE_SSP, 0, NULL },
    { 23, "SSP: the least clock may fall", MODE_SSP, 0, 
      "a joiner's clock is above every W reported, and clocks only rise" },
    { 24, "what a reopened step drops stays on disk", MODE_SYNC, 8, NULL },
    { 25, "frames of before this tenure are accepted", 0, 0, 
      "without replicas a shard moves only to a life that no member could have sent to before" },
    { 30, "members take results of before their set changed", MODE_SYNC, 4, NULL },
    { 31, "members finish without COMPLETE of every shard", MODE_SYNC, 0, NULL },
    { 32, "members keep results when their set changed", MODE_SYNC, 0, NULL },
    { 33, "members do not push again to a new tenure", MODE_SYNC, 0, NULL },
    { 34, "members send the clock before what is unacknowledged", MODE_SSP, 0, NULL },
    { 40, "the gone are in steps up to what a primary that gives the shard away has" },
    { 41, "joiners that have not everything count for the step of new members" },
    { 42, "joiners become backups before they have everything" },
    { 43, "a joiner becomes the primary" },
    { 44, "a new primary is said to serve for as long as the one before" },
    { 45, "backups need not report" },
    { 46, "a disk that is back goes before living backups" },
    { 50, "a step is marked before backups have its results" },
    { 51, "a promoted backup announces before the others have its mark" },
    { 52, "who is named the next primary takes more from the old one" },
    { 53, "frames of servers count in any epoch" },
    { 54, "DONE of before this tenure counts" },
    { 55, "a first value is pulled before it is held" },
    { 56, "a record says a clock whose pushes do not go before it" },
    { 57, "a joiner that has everything is not waited for" },
    { 58, "one backup of two is enough" },
    { 59, "a joiner's versions are compared by their steps" },
    { 60, "a promoted backup takes its results for safe" },
    { 61, "backups report steps that are not complete" },
    { 62, "a joiner that has everything has it of the next primary, too" },
    { 63, "a gradient is applied to any version" },
    { 64, "a promoted backup waits for clocks to know that asynchronous steps are over" },
    { 65, "acknowledgements of older images count" },
    { 66, "backups do not take settings" },
    { 67, "backups are not told where synchronous steps begin" },
    { 68, "frames behind one that closed its connection count" },
    { 69, "a primary sends nothing again on a new connection" },
};

static bool hunt(const struct sim_options *o, const struct mutant *m, uint64_t seeds)
{
    struct sim_options options = *o;
    struct sim_stats stats;
    struct sim_result r;
    seeds *= m->times ? m->times : 1;
    mutant_now = m->number;
    options.mode = m->mode;
    for (uint64_t i = 0; i < seeds; i++) {
        options.seed = o->seed + i;
        sim_run(&options, &stats, &r);
        if (!r.failed)
            continue;
        mutant_now = 0;
        printf("%4d  %-68s seed %-6lu %.100s\n", m->number, m->name, (unsigned long)options.seed, r.why);
        fflush(stdout);
        return true;
    }
    mutant_now = 0;
    if (m->survives)
        printf("%4d  %-68s survives, as expected: %s\n", m->number, m->name, m->survives);
    else
        printf("%4d  %-68s SURVIVES %lu seeds\n", m->number, m->name, (unsigned long)seeds);
    fflush(stdout);
    return false;
}

int mutants_run(const struct sim_options *o, uint64_t seeds, int only)
{
    uint32_t n = 0, caught = 0, missed = 0;
    for (size_t i = 0; i < sizeof mutants / sizeof *mutants; i++) {
        if (only && mutants[i].number != only)
            continue;
        bool noticed = hunt(o, &mutants[i], seeds);
        n++;
        caught += noticed;
        missed += !noticed && !mutants[i].survives;
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
