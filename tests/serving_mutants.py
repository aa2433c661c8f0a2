from tests.paging_mutants import Mutant

MUTANTS: tuple[Mutant, ...] = ()
