/* mutant.h - guards that `make mutants` removes one at a time, to prove that the simulator sees it.
 *
 * In a normal build MUTANT(n) is the constant 0. With -DKEEPSTEP_MUTANTS the simulator sets mutant_now. */
#ifndef BASE_MUTANT_H
#define BASE_MUTANT_H

#ifdef KEEPSTEP_MUTANTS
extern int mutant_now;
#define MUTANT(n) (mutant_now == (n))
#else
#define MUTANT(n) 0
#endif

#endif
