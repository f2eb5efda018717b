//! Workers of a measurement, each a process of its own on loopback: started with an argument list, told of each other and
//! given an identity, and joined by a fabric on their side.

use std::error::Error;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use shoal_net::identity::{Authority, Identity};
use shoal_net::{Endpoint, Fabric, Security, Settings, connect};

pub type Outcome<T> = Result<T, Box<dyn Error>>;

/// Workers that were told of each other, and what each says.
pub struct Processes {
    workers: Vec<Child>,
    pub outputs: Vec<Lines<BufReader<ChildStdout>>>,
}

impl Processes {
    /// Starts this program once for each list of words.
    pub fn start(arguments: impl Iterator<Item = Vec<String>>) -> Outcome<Processes> {
        let authority = Authority::new()?;
        let mut started = Processes { workers: Vec::new(), outputs: Vec::new() };
        let mut addresses = Vec::new();
        for words in arguments {
            let mut worker = Command::new(std::env::current_exe()?)
                .arg("worker")
                .args(words)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let mut lines = BufReader::new(worker.stdout.take().ok_or("no output")?).lines();
            addresses.push(lines.next().ok_or("a worker ended early")??);
            started.outputs.push(lines);
            started.workers.push(worker);
        }
        for (rank, worker) in started.workers.iter_mut().enumerate() {
            let identity = authority.issue(&name(rank))?;
            let pems = [identity.certificate_pem(), identity.key_pem(), identity.authority_pem()];
            let pems = pems.map(|pem| pem.replace('\n', "|"));
            writeln!(worker.stdin.take().ok_or("no input")?, "{}\n{}", addresses.join(" "), pems.join("\n"))?;
        }
        Ok(started)
    }

    /// Waits for all of them.
    pub fn finish(self) -> Outcome<()> {
        for mut worker in self.workers {
            let status = worker.wait()?;
            if !status.success() {
                return Err(format!("a worker ended with {status}").into());
            }
        }
        Ok(())
    }
}

fn name(rank: usize) -> String {
    format!("worker-{rank}.bench")
}

/// In a worker: joins the others.
pub fn join(rank: usize, secure: &str, settings: &Settings) -> Outcome<Arc<Fabric>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    let mut lines = std::io::stdin().lines();
    let mut line = || -> Outcome<String> { Ok(lines.next().ok_or("the input ended")??) };
    let addresses = line()?.split(' ').map(str::parse).collect::<Result<Vec<SocketAddr>, _>>()?;
    let security = match secure {
        "true" => {
            let mut pem = || line().map(|line| line.replace('|', "\n"));
            let identity = Identity::from_pem(&pem()?, &pem()?, &pem()?)?;
            Security::Tls { identity, names: (0..addresses.len()).map(name).collect() }
        }
        _ => Security::Plain,
    };
    Ok(connect(Endpoint { rank, listener, addresses, fabric: 1, security }, settings)?)
}
