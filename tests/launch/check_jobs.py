"""The job files, read by their own tools: run by test_jobs.py with the interpreter `DCACHE_JOBS_PYTHON` names.

    python tests/launch/check_jobs.py {sky|jobset} FILE

reads a file as SkyPilot, or JobSet and Kubernetes, do; status 0 if they take it, an exception if not. Neither asks a cloud.
"""

import sys

import yaml


def check_sky(config):
    import sky

    task = sky.Task.from_yaml_config(config, env_overrides=[("BUCKET", "some-bucket")])
    assert task.run and task.setup and list(task.storage_mounts) == ["/bucket"]
    for resources in task.resources:
        assert resources.use_spot and resources.job_recovery["recover_on_exit_codes"], resources
        assert resources.accelerators, resources


def check_jobset(config):
    import kubernetes_validate
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    # The models drop what they do not know, so a misspelt field does not come back.
    assert JobsetV1alpha2JobSet.from_dict(config).to_dict() == config
    for job in config["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, "1.35", strict=True)


if __name__ == "__main__":
    kind, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        {"sky": check_sky, "jobset": check_jobset}[kind](yaml.safe_load(file))
