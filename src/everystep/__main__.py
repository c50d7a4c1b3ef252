from everystep.cli.app import main

main()
