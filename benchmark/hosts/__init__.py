"""Updates between hosts: network namespaces with shaped links, as in `test/support/hosts.py`.

__main__  `python -m benchmark.hosts`, what `make bench-hosts` runs: the cases, and the rows that they make
job       what runs on the hosts
"""
