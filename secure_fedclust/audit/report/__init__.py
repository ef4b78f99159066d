"""The report: what was promised, enforced, attacked, and what could not be checked."""
