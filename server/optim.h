/* optim.h - server-side optimizers, element by element as PyTorch's (torch.optim) to the last bit that
 * f32/f64 arithmetic in the same order gives.
 *
 * Pure functions over arrays; value and gradient in the accumulator type of the tensor (f32 or f64;
 * ADD also i32, i64, u8). Out of place: new value and new state go to other memory than the old, so that
 * the step can be undone by keeping the old pointers. The output may be the gradient's memory. */
#ifndef SERVER_OPTIM_H
#define SERVER_OPTIM_H

#include <stdbool.h>
#include "wire/dtype.h"

enum optim_kind { OPTIM_ADD = 1, OPTIM_SGD, OPTIM_ADAGRAD, OPTIM_RMSPROP, OPTIM_ADAM, OPTIM_ADAMW };
/* Numbers are on the wire (struct setting.option) and on disk. */
enum optim_option {
    OPT_LR = 1, OPT_WD, OPT_MOMENTUM, OPT_DAMPENING, OPT_NESTEROV, OPT_BETA1, OPT_BETA2, OPT_EPS,
    OPT_ALPHA, OPT_LR_DECAY, OPT_AMSGRAD_RESERVED, OPT_CENTERED_RESERVED, OPT_INITIAL_ACCUMULATOR, OPT_MAX
};
struct optim {
    enum optim_kind kind;
    double option[OPT_MAX];      /* by enum optim_option; booleans are 0 and 1 */
};

/* "add", "sgd lr=0.1 momentum=0.9 dampening=0 nesterov=1 wd=0.01", "adagrad", "rmsprop alpha=.99",
 * "adam" (wd coupled), "adamw" (wd decoupled): PyTorch's defaults where an option is left out (sgd
 * needs lr). 0, or KS_EINVAL with a line in err (256 bytes) that names the unknown or bad word and the
 * known ones. */
int optim_parse(const char *text, struct optim *ret, char *err);
const char *optim_option_name(enum optim_option o);
/* KS_EINVAL: no such name (err lists them) or not an option of this kind. */
int optim_option_parse(const char *name, enum optim_option *ret);
bool optim_has_option(enum optim_kind kind, enum optim_option o);
/* Is the value allowed (lr >= 0, 0 <= beta < 1, ...)? KS_EINVAL with a line in err. */
int optim_option_check(enum optim_option o, double value, char *err);
/* Changes an option of an optimizer whose tensor has state already. KS_EINVAL with a line in err, o untouched: not an
 * option of this kind, not an allowed value, or optim_slots would change (momentum from or to 0). */
int optim_option_set(struct optim *o, enum optim_option option, double value, char *err);
/* Floats of state an element (0, 1 or 2), in the accumulator type. */
unsigned optim_slots(const struct optim *o);
/* Is this kind possible for this dtype? */
bool optim_allows(enum optim_kind kind, enum dtype t);
/* What state starts as (zeros, or Adagrad's initial accumulator); n elements, slots one after another. */
void optim_state_init(const struct optim *o, enum dtype acc_t, void *state, size_t n);
/* One step: t is its number for this chunk, from 1. state arrays hold slots * n. grad is the reduced
 * gradient. new_value may equal grad; new_state must not overlap state. */
void optim_apply(const struct optim *o, enum dtype acc_t, uint64_t t, size_t n, const void *value,
                 const void *state, const void *grad, void *new_value, void *new_state);

#endif
