/* How stale a gradient may be: for f = h x^2 / 2 and x[t+1] = x[t] - rate h x[t-tau] the largest stable
 * rate is 2 sin(pi / (2 (2 tau + 1))) / h. Found here by bisection over runs of the server's own SGD. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "server/optim.h"

enum { DELAYS = 9, STEPS = 6000 };

/* Does |x| shrink over a long run from 1? The slowest mode near the limit decides. */
static bool stable(double rate, double momentum, double h, int tau)
{
    struct optim o = {.kind = OPTIM_SGD, .option = {[OPT_LR] = rate, [OPT_MOMENTUM] = momentum}};
    double x[DELAYS], velocity = 0, largest = 0;
    for (int i = 0; i < DELAYS; i++)
        x[i] = 1;
    for (uint64_t t = 1; t <= STEPS; t++) {
        double grad = h * x[tau], next, next_velocity = 0;
        optim_apply(&o, DTYPE_F64, t, 1, &x[0], &velocity, &grad, &next, &next_velocity);
        for (int i = DELAYS - 1; i > 0; i--)
            x[i] = x[i - 1];
        x[0] = next;
        velocity = next_velocity;
        if (t > STEPS - 100)
            largest = fmax(largest, fabs(next));
        if (!(fabs(next) < 1e6))
            return false;
    }
    return largest < 1;
}

static double largest_stable_rate(double momentum, double h, int tau)
{
    double low = 0, high = 8 / h;
    while (high - low > 1e-4 * high) {
        double middle = (low + high) / 2;
        if (stable(middle, momentum, h, tau))
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void test_table_of_delays(void **arg)
{
    (void)arg;
    static const double curvature[] = {0.1, 1, 25};
    for (size_t k = 0; k < 3; k++) {
        for (int tau = 0; tau < DELAYS; tau++) {
            double want = 2 * sin(M_PI / (2 * (2 * tau + 1))) / curvature[k];
            double found = largest_stable_rate(0, curvature[k], tau);
            if (fabs(found - want) > 0.02 * want)
                fail_msg("h = %g, tau = %d: %.5g instead of %.5g", curvature[k], tau, found, want);
        }
    }
}

static void test_momentum_and_delay(void **arg)
{
    (void)arg;
    /* Without delay momentum 0.9 allows nearly twice the rate, 2 (1 + 0.9) / h; one stale step undoes that. */
    double fresh = largest_stable_rate(.9, 1, 0), plain = largest_stable_rate(0, 1, 1),
           heavy = largest_stable_rate(.9, 1, 1);
    assert_true(fabs(fresh - 3.8) < 0.02 * 3.8);
    assert_true(fabs(plain - 1) < 0.02);
    assert_true(heavy > 0);
    if (heavy > 0.25 * plain)
        fail_msg("momentum 0.9 at delay 1: %.4g, without momentum %.4g", heavy, plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table_of_delays),
        cmocka_unit_test(test_momentum_and_delay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
