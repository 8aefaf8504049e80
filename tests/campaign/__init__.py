"""The campaign: hours of faults and of hostile input, judged by an oracle that shares nothing with Nightmill.

    python -m tests.campaign [--seed N] [--minutes M] [--only PART ...] [--plan]

Parts: `postgresql` and `sqlite` (a night under fire: killed workers, servers that go away, poison), `run`
(`nightmill run`, killed and started again), `models` (mutated model files), `templates` (hostile chat
templates). A seed names one campaign: what it does is computed before it begins. A mutated file that broke a
rule is kept, and opened again with `echo FILE | python -m tests.campaign.opener`. Exits with 1 on
any violation.
"""
