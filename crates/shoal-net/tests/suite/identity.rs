//! Who is let into a fabric, and what becomes of those who are not.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use crate::common::{Random, each, identified, join_all, listeners, settings, worker_name};
use shoal_net::identity::{Authority, Identity};
use shoal_net::{Endpoint, Error, Security, Settings, Tag, connect};

fn impatient() -> Settings {
    Settings { join_deadline: Duration::from_millis(1500), ..settings() }
}

/// Both sides must fail to join, each for lack of the other.
fn nobody_joins(results: Vec<Result<std::sync::Arc<shoal_net::Fabric>, Error>>, reason: &str) {
    let mut said = String::new();
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.expect_err("nobody can join");
        assert!(matches!(error, Error::Join { .. }), "worker {rank}: {error}");
        assert!(
            error.to_string().contains(&format!("worker {}", 1 - rank)),
            "worker {rank} names its peer: {error}"
        );
        said += &error.to_string();
    }
    assert!(said.contains(reason), "{reason:?} is not in: {said}");
}

#[test]
fn an_identity_survives_being_written_down() {
    let authority = Authority::new().expect("an authority");
    let again = Authority::from_pem(authority.certificate_pem(), &authority.key_pem()).expect("read back");
    let workers = join_all(2, &settings(), |rank| {
        // One was issued before the authority was written down, one after, and one of the two was written down itself.
        let Security::Tls { identity, names } =
            identified(if rank == 0 { &authority } else { &again }, rank, 2)
        else {
            unreachable!("identified makes TLS")
        };
        let pems = (identity.certificate_pem(), identity.key_pem(), identity.authority_pem());
        Security::Tls { identity: Identity::from_pem(pems.0, pems.1, pems.2).expect("read back"), names }
    });
    let workers: Vec<_> = workers.into_iter().map(|joined| joined.expect("joined")).collect();
    let results = each(&workers, |fabric| match fabric.rank() {
        0 => fabric.send(1, Tag(1), &[5; 100_000]),
        _ => fabric.receive(0, Tag(1), &mut [0; 100_000]),
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn a_certificate_of_another_authority_is_refused() {
    let (ours, theirs) = (Authority::new().expect("an authority"), Authority::new().expect("an authority"));
    let results =
        join_all(2, &impatient(), |rank| identified(if rank == 0 { &ours } else { &theirs }, rank, 2));
    nobody_joins(results, "certificate");
}

#[test]
fn a_certificate_of_another_worker_is_refused() {
    let authority = Authority::new().expect("an authority");
    // Worker 1 holds the fleet's certificate of worker 2. It is refused in both directions.
    let results = join_all(2, &impatient(), |rank| {
        let identity = authority.issue(&worker_name(if rank == 1 { 2 } else { 0 })).expect("an identity");
        Security::Tls { identity, names: vec![worker_name(0), worker_name(1)] }
    });
    nobody_joins(results, "its certificate is another's");
}

#[test]
fn a_worker_without_tls_is_refused_by_one_with() {
    let authority = Authority::new().expect("an authority");
    let results =
        join_all(
            2,
            &impatient(),
            |rank| if rank == 0 { identified(&authority, 0, 2) } else { Security::Plain },
        );
    nobody_joins(results, "worker");
}

#[test]
fn a_worker_of_another_fabric_is_refused() {
    let (listeners, addresses) = listeners(2);
    let results = std::thread::scope(|scope| {
        let joining: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let addresses = addresses.clone();
                let endpoint =
                    Endpoint { rank, listener, addresses, fabric: rank as u128, security: Security::Plain };
                scope.spawn(move || connect(endpoint, &impatient()))
            })
            .collect();
        joining.into_iter().map(|joined| joined.join().expect("joining does not panic")).collect()
    });
    nobody_joins(results, "of another fabric");
}

#[test]
fn garbage_on_the_port_holds_nobody_up() {
    for secure in [false, true] {
        let authority = Authority::new().expect("an authority");
        let (listeners, addresses) = listeners(2);
        let mut strangers = Vec::new();
        for (number, address) in addresses.iter().cycle().take(20).enumerate() {
            let mut stranger = TcpStream::connect(address).expect("the port is open");
            stranger.write_all(&Random(number as u64).bytes(number * 50)).expect("written");
            // Some stay, silent, and some go.
            if number % 3 > 0 {
                strangers.push(stranger);
            }
        }
        std::thread::scope(|scope| {
            for (rank, listener) in listeners.into_iter().enumerate() {
                let security = if secure { identified(&authority, rank, 2) } else { Security::Plain };
                let endpoint = Endpoint { rank, listener, addresses: addresses.clone(), fabric: 1, security };
                scope.spawn(move || connect(endpoint, &settings()).expect("garbage keeps nobody out"));
            }
        });
    }
}

#[test]
fn connections_without_identities_stay_on_loopback() {
    let (mut listeners, mut addresses) = listeners(2);
    addresses[1] = "10.0.0.7:9000".parse().expect("an address");
    let endpoint =
        Endpoint { rank: 0, listener: listeners.remove(0), addresses, fabric: 1, security: Security::Plain };
    let error = connect(endpoint, &settings()).expect_err("it is refused at once");
    assert!(
        matches!(error, Error::PlainOutside { .. }) && error.to_string().contains("10.0.0.7:9000"),
        "{error}"
    );
    assert!(error.hint().is_some());
}

#[test]
fn names_that_no_certificate_can_bear_are_refused() {
    let authority = Authority::new().expect("an authority");
    for name in ["", "two words", "under_score!", "a..b"] {
        assert!(matches!(authority.issue(name), Err(Error::Identity { .. })), "{name:?}");
    }
}
