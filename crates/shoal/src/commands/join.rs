//! `shoal join`: this machine works for a fleet, until it is told to go.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use shoal_control::message::Price;
use shoal_crew::{Crew, Setup};
use shoal_net::collective::TREE_BYTES_MAX;
use shoal_net::{Guard, Reception, Settings};
use shoal_service::access::state_folder;
use shoal_service::http::Target;
use shoal_service::membership::Membership;
use shoal_service::notice::{self, Cloud};
use shoal_service::token::JoinToken;
use shoal_service::worker_driver::{Happening, Notable, WorkerDriver};

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::job::{DeviceChoice, parse_bytes};
use crate::live::drill::drilled;
use crate::live::leash::Leash;
use crate::live::played::{Played, follow_cues};
use crate::live::within::JobsUnder;
use crate::live::worker::{Given, Hired, pass_on};

#[derive(clap::Args)]
pub struct Options {
    /// The controller's address, as `shoal up` prints it
    url: String,
    /// A join token; not needed by a machine that has joined before
    #[arg(long)]
    token: Option<String>,
    /// Its name in the fleet: small letters, digits and hyphens; otherwise the machine's
    #[arg(long)]
    name: Option<String>,
    /// Where it keeps its identity and what it prepares
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Where other workers reach it; otherwise the address that leads to the controller, and any port
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Workers with the same are lost together; otherwise the machine's name
    #[arg(long, value_name = "NAME")]
    machine: Option<String>,
    /// What it computes on
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// What plans may use of the device's memory: 8GiB
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// What they may use of the host's, beside
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,
    /// Cores that it uses
    #[arg(long)]
    threads: Option<usize>,
    /// Dollars an hour
    #[arg(long, default_value_t = 0.0)]
    price: f64,
    /// Whose preemption notices it listens to
    #[arg(long, value_enum, default_value = "auto")]
    cloud: CloudChoice,
    /// Where that cloud's metadata is, for tests
    #[arg(long, value_name = "URL", hide = true)]
    metadata: Option<String>,
    #[command(flatten)]
    jobs_under: JobsUnder,
    /// How long it takes at most to hand over its work when it is told to go
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// Let `shoal chaos` kill, freeze, cut off and slow it down
    #[arg(long)]
    drills: bool,
    /// Play a device, as `shoal lab` wrote it
    #[arg(long, value_name = "FILE", hide = true)]
    plays: Option<PathBuf>,
    #[command(flatten)]
    leash: Leash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CloudChoice {
    /// By the machine's firmware
    Auto,
    None,
    Aws,
    Gcp,
    Azure,
}

/// How long peers are waited for, and how long their silence is borne: both well within what a change of plan may take.
const PEERS: Settings = Settings {
    deadline: Duration::from_secs(2),
    message_deadline: Duration::from_secs(600),
    join_deadline: Duration::from_secs(10),
    streams: 2,
    tree_bytes_max: TREE_BYTES_MAX,
    shape: None,
};

pub fn run(options: Options) -> Result {
    if options.plays.is_none() {
        options.leash.hold();
    }
    let name = options.name.clone().unwrap_or_else(host_name);
    let token: Option<JoinToken> = options.token.as_deref().map(str::parse).transpose()?;
    let folder = options.folder.clone().unwrap_or_else(|| state_folder().join("workers").join(&name));
    let membership = Membership::open(&folder, &options.url, token.as_ref(), &name)?;
    let (name, identity) = (membership.name.clone(), membership.identity.clone());

    let mut given = given(&options, &folder)?;
    let towards = address_towards(&membership.target)?;
    given.within = options.jobs_under.within(towards)?;
    let listen = match options.listen {
        Some(listen) => listen,
        None => SocketAddr::new(towards, 0),
    };
    let listener = TcpListener::bind(listen).map_err(CliError::at(folder.as_path()))?;
    let is_plain = given.played.as_ref().is_some_and(|played| played.part.plain);
    let guard = if is_plain { Guard::Plain } else { Guard::Tls(identity.clone()) };
    let reception = Arc::new(Reception::open(listener, guard)?);
    let machine = options.machine.clone().unwrap_or_else(host_name);
    let mut about = given.about((&name, &identity), reception.address(), machine, &PEERS)?;
    if options.price > 0.0 {
        about.dollars_per_hour = options.price;
    }
    about.drills = options.drills;
    eprintln!("{name}: {}, reached at {}", given.device.describe(), reception.address());
    if let Some(sentence) = given.within.sentence() {
        eprintln!("{name}: {sentence}");
    }

    let price = Price((about.dollars_per_hour.max(0.0) * 1e6) as u64);
    let driver = WorkerDriver::new(membership, about.text(), price);
    let lease = driver.lease();
    let may_run = Arc::new(move || lease.may_run());
    let port = reception.clone();
    let network = match &given.played {
        None => PEERS,
        Some(played) => {
            let tree_bytes_max = played.tree_bytes_max();
            Settings { shape: Some(played.shape()), streams: 1, tree_bytes_max, ..PEERS }
        }
    };
    let is_played = given.played.is_some();
    let setup = Setup { about, reception, assemble: given.assembler(), may_run, network };
    let (crew, outlets) = Crew::new(setup);
    if is_played {
        follow_cues(crew.slowness());
    }
    let driver = driver.drilled(options.drills.then(|| drilled(port, crew.slowness())));
    pass_on(outlets, driver.sender());
    watch_cloud(&options, &driver)?;
    leave_on_signals(&driver, options.grace)?;
    Ok(driver.run(&mut Hired(crew), &mut |notable| show(&name, &notable))?)
}

fn show(name: &str, notable: &Notable) {
    match notable {
        Notable::Connected => eprintln!("{name}: connected"),
        Notable::Disconnected(why) => eprintln!("{name}: {why}; trying again"),
        Notable::Leaving { in_ms, why } => {
            eprintln!("{name}: {why}; leaving within {} s", in_ms.div_ceil(1000));
        }
        Notable::Drilled(drill) => eprintln!("{name}: a drill: {}", drill.name()),
        Notable::DrillRefused(drill) => {
            eprintln!("{name}: refused the drill `{}`: it was not started with --drills", drill.name());
        }
    }
}

fn given(options: &Options, folder: &std::path::Path) -> Result<Given> {
    let size = |key: &str, text: &Option<String>| {
        let read = |text: &String| {
            parse_bytes(text).map_err(|what| CliError::said(format!("{key}: {what}"), "write 8GiB, say"))
        };
        text.as_ref().map(read).transpose()
    };
    if let Some(part) = &options.plays {
        return Ok(Given::playing(Played::read(part)?, folder));
    }
    let memory = size("--memory", &options.memory)?;
    let host_memory = size("--host-memory", &options.host_memory)?;
    let device = LocalDevice::choose(options.device, memory, options.threads)?;
    Ok(Given::new(device, memory, host_memory, folder))
}

/// The first signal is a notice; the second ends the process at once.
fn leave_on_signals(driver: &WorkerDriver, grace_seconds: u64) -> Result {
    let (happenings, told) = (driver.sender(), AtomicBool::new(false));
    let handler = move || {
        if told.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        let why = "it was told to go".to_owned();
        let _ = happenings.send(Happening::Notice { in_ms: grace_seconds * 1000, why });
    };
    ctrlc::set_handler(handler).map_err(|error| CliError::Said {
        sentence: format!("signals cannot be handled: {error}"),
        hint: None,
    })
}

fn watch_cloud(options: &Options, driver: &WorkerDriver) -> Result {
    let cloud = match options.cloud {
        CloudChoice::Auto => Cloud::here(),
        CloudChoice::None => None,
        CloudChoice::Aws => Some(Cloud::Aws),
        CloudChoice::Gcp => Some(Cloud::Gcp),
        CloudChoice::Azure => Some(Cloud::Azure),
    };
    let metadata: Option<Target> = options.metadata.as_deref().map(str::parse).transpose()?;
    if let Some(cloud) = cloud {
        let complaints = Arc::new(|what: &str| eprintln!("warning: {what}"));
        notice::watch(cloud.notices(metadata), driver.sender(), complaints);
    }
    Ok(())
}

/// The machine's name, made one of a worker.
fn host_name() -> String {
    let system = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let first = system.trim().split('.').next().unwrap_or_default().to_ascii_lowercase();
    let label: String = first.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let label = label.trim_matches('-');
    match label.contains(|c: char| c.is_ascii_lowercase()) {
        true => label.chars().take(63).collect(),
        false => format!("worker-{label}").trim_end_matches('-').chars().take(63).collect(),
    }
}

/// The address of this machine from which packets to the controller leave: where its other workers are, too. Nothing is
/// sent for it.
fn address_towards(controller: &Target) -> Result<IpAddr> {
    let host = controller.host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let found = || -> std::io::Result<IpAddr> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
            .and_then(|socket| socket.connect((host.as_str(), controller.port)).map(|()| socket))
            .or_else(|_| {
                let socket = UdpSocket::bind("[::]:0")?;
                socket.connect((host.as_str(), controller.port)).map(|()| socket)
            })?;
        Ok(socket.local_addr()?.ip())
    };
    found().map_err(|error| {
        CliError::said(
            format!("no address of this machine leads to {controller}: {error}"),
            "name one that other workers reach with --listen ADDRESS:PORT",
        )
    })
}
