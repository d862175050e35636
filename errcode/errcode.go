// Package errcode has the eight error codes of Triton's API and the error that carries one.
//
// The code is attached where a fault is understood; layers above add context with
// fmt.Errorf and %w and keep it. gRPC and HTTP statuses are derived from it in one
// place, package endpoint.
package errcode

import (
	"errors"
	"fmt"
)

// Code says what kind of fault an error is. The values are those of TRITONSERVER_Error_Code
// and travel between host and stub, so they never change.
type Code uint8

// Source: tritonserver.h, TRITONSERVER_errorcode_enum.
const (
	Unknown Code = iota
	Internal
	NotFound
	InvalidArg
	Unavailable
	Unsupported
	AlreadyExists
	Cancelled
)

var names = [...]string{"UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"}

// String is the code's name as in Triton's messages, "Code(9)" for a value that is none.
func (c Code) String() string {
	if int(c) < len(names) {
		return names[c]
	}
	return fmt.Sprintf("Code(%d)", uint8(c))
}

// Valid tells whether c is one of the eight; a code read from another process may not be.
func (c Code) Valid() bool { return int(c) < len(names) }

// Error is an error with a code. Clients read its message.
type Error struct {
	Code    Code
	Message string
	cause   error
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the error given to Errorf with %w, or nil.
func (e *Error) Unwrap() error { return e.cause }

// Errorf makes an error with a code. %w keeps a cause, as in fmt.Errorf.
func Errorf(code Code, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// Of is the code of the outermost coded error in err's chain, Internal where there is none.
func Of(err error) Code {
	var coded *Error
	if errors.As(err, &coded) {
		return coded.Code
	}
	return Internal
}
