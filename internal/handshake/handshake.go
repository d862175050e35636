// Package handshake has what host and stub must agree on before they can talk.
package handshake

const (
	// ProtocolVersion is the version of proto/backend and of the frames, given to go-plugin.
	ProtocolVersion = 1
	// CookieKey and CookieValue tell a stub that a host started it, not a person.
	CookieKey   = "NEREID_STUB"
	CookieValue = "9b1f3d0c6c5e4a57a1d2"
	// PluginName is the service's name in go-plugin's table.
	PluginName = "backend"
	// DescriptorFD is the stub's end of the socket over which descriptors travel.
	DescriptorFD = 3
	// ForkServerFD is a Python stub's connection to the fork server of its environment.
	ForkServerFD = 4
	// SocketDirectoryKey names the variable with the folder of the control socket; go-plugin sets it.
	SocketDirectoryKey = "PLUGIN_UNIX_SOCKET_DIR"
)
