/* hello.c - every rank adds its number and all get the sum: keepstep launch -n 4 -- build/worker/examples/hello */
#include <stdio.h>

#include "keepstep.h"

int main(void)
{
    struct ks_job *job;
    struct ks_tensor *sum;
    struct ks_handle *handle;
    struct ks_spec spec = {.dtype = KS_F64, .kind = KS_REDUCE, .op = KS_SUM};
    int r = ks_open(NULL, &job);
    if (r) {
        fprintf(stderr, "hello: %s\n", ks_last_error(NULL));
        return 1;
    }
    double x = (double)ks_rank(job);
    r = ks_tensor_register(job, "sum of ranks", &spec, &sum);
    r = r ? r : ks_push_pull(sum, &x, &x, 1.0, &handle);
    r = r ? r : ks_step_end(job);
    r = r ? r : ks_wait(handle, -1);
    if (r)
        fprintf(stderr, "hello: %s\n", ks_last_error(job));
    else
        printf("rank %lld of %lld: the sum of ranks is %g\n", (long long)ks_rank(job), (long long)ks_size(job), x);
    (void)ks_leave(job, -1);
    ks_close(job);
    return r != 0;
}
