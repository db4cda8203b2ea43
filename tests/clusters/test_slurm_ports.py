import itertools

from lightning_ddp_ext.clusters.slurm import candidate_ports, lightnings_port, step_name

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}


def test_a_jobs_first_step_begins_with_lightnings_port():
    assert candidate_ports(STEP)[0] == lightnings_port(STEP) == 19711
    assert candidate_ports({"SLURM_JOB_ID": "1234567"})[0] == lightnings_port({"SLURM_JOB_ID": "1234567"}) == 19567


def test_the_ports_of_a_step_differ_and_lie_where_lightnings_do():
    for job in (1, 4711, 9999, 10000, 123456789):
        ports = candidate_ports({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "2"})
        assert len(set(ports)) == len(ports) == 4
        assert all(15000 <= port < 25000 for port in ports)


def test_jobs_steps_and_restarts_that_meet_on_a_node_have_ports_of_their_own():
    near = [
        {"SLURM_JOB_ID": str(4711 + job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restarts)}
        for job, step, restarts in itertools.product(range(5), range(3), range(3))
    ]
    ports = [port for environ in near for port in candidate_ports(environ)]
    assert len(set(ports)) == len(ports)


def test_the_name_of_a_step_changes_with_job_step_and_requeue():
    changes = ({}, {"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"})
    names = [step_name({**STEP, **change}) for change in changes]
    assert len(set(names)) == len(names)
    assert step_name({**STEP, "SLURM_PROCID": "1", "SLURM_NODEID": "1"}) == names[0]
