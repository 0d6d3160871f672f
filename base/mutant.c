#include "base/mutant.h"

#ifdef KEEPSTEP_MUTANTS
int mutant_now;
#endif
