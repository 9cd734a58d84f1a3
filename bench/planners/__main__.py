from bench.planners.compare import main

main()
