/* optim_steps.h - one step of each optimizer, for elements of type REAL. optim.c includes it once for
 * f32 and once for f64, with STEP(name) making the functions' names.
 *
 * Hyper-parameters are computed in double and then rounded to REAL, elements are computed in REAL, in the
 * order of torch.optim's single-tensor functions (without fused multiply-add):
 *   x.add(y, alpha=a)         x + a * y
 *   x.addcmul(y, z, value=a)  x + (a * y) * z
 *   x.addcdiv(y, z, value=a)  x + (a * y) / z */

/* Coupled weight decay: the gradient that the optimizer sees. */
#define GRADIENT(i) (wd != 0 ? grad[i] + wd * value[i] : grad[i])

INLINE void STEP(sgd)(const struct optim *o, const struct arrays *a)
{
    size_t n = a->n;
    const REAL *value = a->value, *grad = a->grad;
    REAL *new_value = a->new_value;
    SCALAR wd = (SCALAR)o->option[OPT_WD], rate = (SCALAR)-o->option[OPT_LR];
    INDEPENDENT for (size_t i = 0; i < n; i++) new_value[i] = value[i] + rate * GRADIENT(i);
}

INLINE void STEP(sgd_momentum)(const struct optim *o, uint64_t t, const struct arrays *a)
{
    size_t n = a->n;
    const REAL *value = a->value, *grad = a->grad, *old = a->state;
    REAL *new_value = a->new_value, *velocity = a->new_state;
    SCALAR wd = (SCALAR)o->option[OPT_WD], rate = (SCALAR)-o->option[OPT_LR];
    SCALAR momentum = (SCALAR)o->option[OPT_MOMENTUM], weight = (SCALAR)(1 - o->option[OPT_DAMPENING]);
    bool first = t == 1, nesterov = o->option[OPT_NESTEROV] != 0;
    INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        SCALAR g = GRADIENT(i);
        SCALAR v = first ? g : old[i] * momentum + weight * g;
        velocity[i] = v;
        new_value[i] = value[i] + rate * (nesterov ? g + momentum * v : v);
    }
}

INLINE void STEP(adagrad)(const struct optim *o, uint64_t t, const struct arrays *a)
{
    size_t n = a->n;
    const REAL *value = a->value, *grad = a->grad, *old = a->state;
    REAL *new_value = a->new_value, *sum = a->new_state;
    SCALAR wd = (SCALAR)o->option[OPT_WD], eps = (SCALAR)o->option[OPT_EPS];
    SCALAR rate = (SCALAR)(-o->option[OPT_LR] / (1 + ((double)t - 1) * o->option[OPT_LR_DECAY]));
    INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        SCALAR g = GRADIENT(i);
        SCALAR s = old[i] + g * g;
        sum[i] = s;
        new_value[i] = value[i] + rate * g / (SQRT(s) + eps);
    }
}

INLINE void STEP(rmsprop)(const struct optim *o, const struct arrays *a)
{
    size_t n = a->n;
    const REAL *value = a->value, *grad = a->grad, *old = a->state;
    REAL *new_value = a->new_value, *square = a->new_state;
    SCALAR wd = (SCALAR)o->option[OPT_WD], rate = (SCALAR)-o->option[OPT_LR], eps = (SCALAR)o->option[OPT_EPS];
    SCALAR alpha = (SCALAR)o->option[OPT_ALPHA], rest = (SCALAR)(1 - o->option[OPT_ALPHA]);
    INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        SCALAR g = GRADIENT(i);
        SCALAR s = old[i] * alpha + rest * g * g;
        square[i] = s;
        new_value[i] = value[i] + rate * g / (SQRT(s) + eps);
    }
}

INLINE void STEP(rmsprop_momentum)(const struct optim *o, const struct arrays *a)
{
    size_t n = a->n;
    const REAL *value = a->value, *grad = a->grad, *old = a->state, *old_velocity = old + n;
    REAL *new_value = a->new_value, *square = a->new_state, *velocity = square + n;
    SCALAR wd = (SCALAR)o->option[OPT_WD], rate = (SCALAR)-o->option[OPT_LR], eps = (SCALAR)o->option[OPT_EPS];
    SCALAR alpha = (SCALAR)o->option[OPT_ALPHA], rest = (SCALAR)(1 - o->option[OPT_ALPHA]);
    SCALAR momentum = (SCALAR)o->option[OPT_MOMENTUM];
    INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        SCALAR g = GRADIENT(i);
        SCALAR s = old[i] * alpha + rest * g * g;
        SCALAR v = old_velocity[i] * momentum + g / (SQRT(s) + eps);
        square[i] = s;
        velocity[i] = v;
        new_value[i] = value[i] + rate * v;
    }
}

/* Adam decays through the gradient, AdamW the value itself. */
INLINE void STEP(adam)(const struct optim *o, uint64_t t, const struct arrays *a)
{
    size_t n = a->n;
    const REAL *value = a->value, *grad = a->grad, *old_mean = a->state, *old_square = old_mean + n;
    REAL *new_value = a->new_value, *mean = a->new_state, *square = mean + n;
    double b1 = o->option[OPT_BETA1], b2 = o->option[OPT_BETA2], lr = o->option[OPT_LR];
    bool decoupled = o->kind == OPTIM_ADAMW;
    SCALAR wd = decoupled ? 0 : (SCALAR)o->option[OPT_WD];
    SCALAR keep = decoupled ? (SCALAR)(1 - lr * o->option[OPT_WD]) : 1;
    SCALAR beta1 = (SCALAR)b1, rest1 = (SCALAR)(1 - b1), beta2 = (SCALAR)b2, rest2 = (SCALAR)(1 - b2);
    SCALAR rate = (SCALAR)(-lr / (1 - pow(b1, (double)t))), eps = (SCALAR)o->option[OPT_EPS];
    SCALAR correction = (SCALAR)sqrt(1 - pow(b2, (double)t));
    INDEPENDENT for (size_t i = 0; i < n; i++)
    {
        SCALAR g = GRADIENT(i);
        SCALAR m = old_mean[i] * beta1 + rest1 * g;
        SCALAR s = old_square[i] * beta2 + rest2 * g * g;
        mean[i] = m;
        square[i] = s;
        new_value[i] = value[i] * keep + rate * m / (SQRT(s) / correction + eps);
    }
}

INLINE void STEP(apply)(const struct optim *o, uint64_t t, const struct arrays *a)
{
    switch (o->kind) {
    case OPTIM_SGD:
        if (o->option[OPT_MOMENTUM] != 0)
            STEP(sgd_momentum)(o, t, a);
        else
            STEP(sgd)(o, a);
        break;
    case OPTIM_RMSPROP:
        if (o->option[OPT_MOMENTUM] != 0)
            STEP(rmsprop_momentum)(o, a);
        else
            STEP(rmsprop)(o, a);
        break;
    case OPTIM_ADAGRAD:
        STEP(adagrad)(o, t, a);
        break;
    case OPTIM_ADAM:
    case OPTIM_ADAMW:
        STEP(adam)(o, t, a);
        break;
    case OPTIM_ADD:
        break;
    }
}

#undef GRADIENT
