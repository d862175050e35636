// Nereid is an inference server whose backends run in processes of their own.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/nereid-serve/nereid/host"
	"github.com/nereid-serve/nereid/stubs/python"
)

// pythonStub is the command of the Python stub: this program, started by itself.
const pythonStub = "python-stub"

func main() {
	if len(os.Args) > 1 && os.Args[1] == pythonStub {
		python.Main()
	}
	root := &cobra.Command{
		Use:   "nereid",
		Short: "An inference server whose backends run in processes of their own",
		Long: "Nereid serves models over the Triton / KServe v2 protocol. Each model runs in a process of\n" +
			"its own, in Go or Python, and shares its tensors with the server without copying them.\n\n" +
			"Serve a model repository:\n\n    nereid serve --model-repository=examples/identity/models",
		SilenceUsage: true, SilenceErrors: true, Version: host.Version,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(serveCommand())
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "nereid:", err)
		os.Exit(1)
	}
}
