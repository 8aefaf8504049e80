"""The campaign: hours of faults and of hostile input, judged by an oracle that shares nothing with Nightmill.

    python -m tests.campaign [--seed N] [--minutes M] [--kills K] [--hangs H] [--only PART ...] [--plan]

Parts:

    postgresql, sqlite   a night under fire: workers, HTTP servers, their callers, those of the client, faults
    run                  `nightmill run` on one file, disturbed and started again
    models, templates    mutated model files, hostile chat templates

Faults of a night, and of a run as far as it has what they are for:

    kills    kill -9 and SIGTERM of workers, engines, servers, Redis, PostgreSQL; connections that are cut
    hangs    for 1 to 60 s: SIGSTOP of workers, engines, servers, Redis, PostgreSQL; a Redis or a PostgreSQL
             that accepts connections and never answers; connections that a proxy freezes, with TCP's
             acknowledgements or in silence, new ones with them or not; a write lock that is held
    disks    one that is full under SQLite, results and uploads (a tmpfs, where this user may mount one); a
             folder of uploads or results that is away, or answers ESTALE, for a second
    clocks   the database's, or a worker's, set back or forth by an hour, and right again
    sleep    workers paused by hand in the middle of their work; one that loads two models in turn
    work     rows and templates that kill or stall their worker, rows and messages that nobody understands,
             cancel, retry, delete and prune beside each other, clients that fork

Rules:

    - What was acknowledged ends, once, with the text of its seed. No change of a row is illegal (`oracle`).
    - Every caller has an answer or a refusal within the limit of its call (`limits`), whatever hangs.
    - Every process that was asked to end has ended within its grace, whatever hangs. What hangs is not
      continued first: in every second hang of a night, and at its end, somebody is asked to end beside it.
    - A worker that sleeps, by hand or between the turns of two models, holds no job and claims none.
    - Nothing is left behind: processes, messages, saved tokens. Workers end for what a fault explains.

A limit is for wrong behaviour, not for slow machines: the time that the machine was late by (`lateness`), and
that a process was itself stopped for, is added.

A seed names one campaign: what it does, and when, is computed before it begins; short ones have short hangs.
`--kills` and `--hangs` repeat all parts, each time with another plan, until so many were carried out: `make
campaign` is the first 8 minutes of `--kills 1000 --hangs 500`. The table at the end has every fault by kind,
and says which were never reached. A night that broke a rule is kept, with its logs, its ledger and what its
disk held; so is a mutated file, which `echo FILE | python -m tests.campaign.opener` opens again. Exits with 1
on any violation.
"""
