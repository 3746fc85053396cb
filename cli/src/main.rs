//! The `oncebox` command; everything is in the library.

fn main() -> std::process::ExitCode {
    oncebox::main()
}
