"""Topics that the question templates are filled with: plain lists, one phrase between two bars."""


def phrases(text: str) -> list[str]:
    """Split bar-separated text into phrases, with the line breaks of the source taken out."""
    return [" ".join(part.split()) for part in text.split("|") if part.strip()]


SCIENCE = phrases("""
plate tectonics | the water cycle | black holes | vaccines | the greenhouse effect | electric motors | sound waves |
lightning | tides | osmosis | natural selection | the human heart | antibiotics | nuclear fusion | nuclear fission |
semiconductors | lasers | radio telescopes | enzymes | fermentation | the immune system | neurons | the periodic table
| acids and bases | oxidation | crystals | magnetism | gravity | friction | buoyancy | inertia | entropy | heat
conduction | evaporation | refraction of light | rainbows | the Doppler effect | comets | asteroids | the life of a
star | solar eclipses | the seasons | earthquakes | volcanoes | glaciers | ocean currents | coral reefs | soil
formation | the nitrogen cycle | the carbon cycle | mitosis | meiosis | dominant and recessive genes | viruses |
bacteria | fungi | pollination | animal migration | hibernation | camouflage | food chains | invasive species | desert
ecosystems | rainforests | wetlands | batteries | solar panels | wind turbines | hydroelectric dams | steam engines |
jet engines | internal combustion engines | bridges under load | pulleys and levers | hydraulic brakes | refrigerators
| microwave ovens | fibre optics | satellites | GPS | radar | sonar | X-ray imaging | ultrasound | insulin |
cholesterol | vitamins | sleep | dreams | pain | memory | colour vision | hearing | balance and the inner ear | muscle
growth | bone healing | allergies | the liver | the kidneys | the lungs | blood types | stem cells | DNA replication |
protein folding | gene editing | cloning | polymers | steel making | concrete | glass | ceramics | corrosion |
catalysts | chemical equilibrium | the ideal gas law | surface tension | viscosity | electric circuits | transformers
in power grids | alternating current | capacitors | transistors | static electricity | angular momentum | centripetal
force | orbits | rocket propulsion | relativity | atoms and isotopes | radioactivity | carbon dating | dark matter |
the big bang | galaxies | meteor showers | weather fronts | hurricanes | tornadoes | ozone | acid rain | desalination
| water purification | composting | crop rotation | photosynthetic algae
""")

COMPUTING = phrases("""
recursion | binary search | hash tables | linked lists | stacks and queues | binary trees | graphs | sorting
algorithms | dynamic programming | big O notation | compilers | interpreters | operating systems | virtual memory |
processes and threads | deadlocks | race conditions | garbage collection | pointers | object-oriented programming |
inheritance | functional programming | closures | decorators in Python | generators in Python | list comprehensions |
exceptions | unit testing | continuous integration | version control | code review | refactoring | design patterns |
APIs | REST | web cookies | HTTP | DNS | TCP and UDP | public-key encryption | password hashing | firewalls | phishing
| two-factor authentication | databases | SQL joins | database indexes | transactions | caching | load balancing |
cloud computing | containers | virtual machines | neural networks | decision trees | linear regression | overfitting |
clustering | gradient descent | recommendation systems | search engines | speech recognition | computer vision |
chatbots | data compression | error-correcting codes | floating-point numbers | binary numbers | regular expressions |
state machines | event loops | asynchronous programming | microservices | open-source licences | blockchains |
spreadsheets | text editors | command-line shells | file systems | solid-state drives | graphics cards | quantum
computers | robotics | 3D printing | self-driving cars | drones | smart watches | barcodes | touch screens | printers
| keyboards | video games | digital photographs | music streaming
""")

SOCIETY = phrases("""
the Roman Republic | the Silk Road | the printing press | the French Revolution | the Industrial Revolution | the
Black Death | the Renaissance | the fall of Constantinople | the Magna Carta | the Ottoman Empire | the Mongol Empire
| ancient Egypt | ancient Athens | the Inca Empire | the Maya | feudalism | the Crusades | the Age of Exploration |
colonialism | the slave trade and its abolition | the American Civil War | the First World War | the Treaty of
Versailles | the Great Depression | the Cold War | the space race | the fall of the Berlin Wall | apartheid | the
suffragettes | trade unions | the United Nations | the European Union | democracy | monarchy | federalism | separation
of powers | human rights | freedom of speech | the rule of law | citizenship | voting systems | taxation | inflation |
supply and demand | unemployment | free trade | tariffs | central banks | interest rates | the stock market |
insurance | mortgages | pensions | minimum wages | monopolies | advertising | globalisation | urbanisation | migration
| public transport | public libraries | compulsory schooling | universal health care | censorship | propaganda |
journalism | social media | privacy | surveillance | capital punishment | prisons | stoicism | utilitarianism |
existentialism | scepticism | the trolley problem | free will | the social contract | moral relativism | Confucianism
| Buddhism | Hinduism | Islam | Judaism | Christianity | Greek mythology | Norse mythology | fairy tales | epic poetry
| tragedy | satire | the novel | haiku | sonnets | Impressionism | Cubism | Baroque music | jazz | opera | ballet |
theatre | photography | cinema | architecture | Gothic cathedrals | Japanese gardens | pottery | chess | the Olympic
Games | football | marathons | national parks | museums | festivals | weddings | funerals | calendars | alphabets |
sign language | dialects | translation | proverbs | humour | etiquette | fashion | money | markets | maps | clocks |
tea | coffee | bread | rice | spices | salt | sugar | chocolate
""")

EVERYDAY = phrases("""
learning to cook | growing tomatoes | keeping a diary | saving money | sleeping better | training for a 5 km run |
learning a language | moving to a new city | adopting a dog | looking after a cat | cleaning an oven | painting a room
| fixing a bicycle tyre | packing for a long journey | planning a birthday party | writing a CV | preparing for a job
interview | asking for a pay rise | giving a presentation | working from home | making friends as an adult | resolving
an argument | saying sorry | breaking a bad habit | reading more books | taking better photographs | learning the
guitar | singing in a choir | playing chess | baking bread | making soup | brewing coffee | eating less meat |
reducing food waste | recycling at home | saving electricity | riding a bicycle to work | driving in snow | camping in
the rain | hiking alone | swimming in the sea | first aid | managing stress | meditation | stretching | drinking
enough water | choosing a laptop | backing up files | choosing a password | tidying a desk | managing e-mail |
studying for an exam | taking notes | memorising a speech | writing a poem | drawing faces | knitting a scarf | sewing
a button | ironing a shirt | polishing shoes | arranging flowers | keeping bees | raising chickens | planting a tree |
building a bookshelf | hanging a picture | unblocking a sink | buying a used car | renting a flat | hosting dinner |
teaching a child to read | helping with homework | visiting grandparents | volunteering | starting a small business |
running a shop | selling at a market | negotiating a price | budgeting as a student | choosing a gift | writing a
wedding speech |
""")

SETTINGS = phrases("""
a lighthouse in winter | an empty railway station | a bakery before dawn | a mountain village | a desert caravan | a
submarine | a space station | a library at night | an old theatre | a fishing harbour | a crowded night train | an
orchard in autumn | a castle kitchen | a hospital waiting room | a school on the last day of term | a flooded street |
a rooftop garden | a clockmaker's workshop | a museum after closing time | a frozen lake | a jungle river | a small
island | a border crossing | a circus tent | a quiet monastery | a newspaper office | a recording studio | a football
stadium | a market hall | a ruined abbey | a ferry in fog | a tea house | a bus in heavy rain | a vineyard | a
snowed-in hotel | a second-hand bookshop | a telescope dome | a hot-air balloon | a blacksmith's forge | a children's
playground
""")

CHARACTERS = phrases("""
a retired sea captain | a shy astronomer | a young violinist | a baker who cannot taste | a detective on her last case
| a robot gardener | a lost tourist | a tired nurse | a clumsy wizard | a honest thief | a talking crow | an ambitious
mayor | a lonely lighthouse keeper | a chess champion | a forgetful inventor | a brave postman | a dragon afraid of
fire | a twin who keeps secrets | a taxi driver | a beekeeper | a watchmaker | a ghost who loves jazz | a translator |
a mountain guide | a stubborn farmer | a child who collects maps | a queen in disguise | a stage magician | a marine
biologist | a night-shift guard | a poet who hates rhyme | a time-travelling librarian
""")

ROLES = phrases("""
a pirate captain | a patient primary school teacher | a travel guide in Lisbon | a Victorian detective | a sports
coach | a career adviser | a chef | a gardener | a museum guide | a medieval blacksmith | an astronaut on Mars | a
stand-up comedian | a news presenter | a librarian | a financial planner | a nutritionist | a lawyer | a nurse | a
software architect | a database administrator | a security expert | a physicist | a chemist | a historian | a
philosopher in ancient Athens | a Roman senator | a Viking explorer | a samurai | a knight | a wizard | an elf | a
dragon | a ghost | a vampire who is vegetarian | a talking cat | an old oak door | a river | the Moon | the planet
Saturn | a clock | a pencil | a teapot | a robot butler | an alien visitor | a time traveller from the year 3000 | a
detective | a weather forecaster | an interviewer | a debate coach | a grandmother who tells stories | a film critic |
a food critic | a poet | a songwriter | an orchestra conductor | a mountain guide | a yoga teacher | a car mechanic |
a pilot | a train driver | a farmer | a beekeeper | a fashion designer | an architect | a judge | a mayor | a fortune
teller
""")

PEOPLE = phrases("""
Isaac Newton | Marie Curie | Albert Einstein | Charles Darwin | Galileo Galilei | Ada Lovelace | Alan Turing | Nikola
Tesla | Thomas Edison | Leonardo da Vinci | Michelangelo | Vincent van Gogh | Pablo Picasso | Frida Kahlo | Rembrandt
| Wolfgang Amadeus Mozart | Ludwig van Beethoven | Johann Sebastian Bach | William Shakespeare | Jane Austen | Charles
Dickens | Leo Tolstoy | Mark Twain | Virginia Woolf | Homer | Dante | Plato | Aristotle | Confucius | Immanuel Kant |
Julius Caesar | Cleopatra | Alexander the Great | Genghis Khan | Joan of Arc | Queen Victoria | Napoleon Bonaparte |
Abraham Lincoln | George Washington | Mahatma Gandhi | Nelson Mandela | Martin Luther King | Winston Churchill | Rosa
Parks | Amelia Earhart | Neil Armstrong | Yuri Gagarin | Christopher Columbus | Marco Polo | Ferdinand Magellan |
Louis Pasteur | Gregor Mendel | Florence Nightingale | Alexander Fleming | Johannes Gutenberg | the Wright brothers |
Henry Ford | Walt Disney | Charlie Chaplin | Alfred Hitchcock | Agatha Christie | Mary Shelley | Jules Verne | Grace
Hopper | Rosalind Franklin | Stephen Hawking | Archimedes | Euclid | Pythagoras | Hypatia
""")

COUNTRIES = phrases("""
France | Spain | Portugal | Italy | Germany | Austria | Switzerland | Belgium | the Netherlands | Denmark | Sweden |
Norway | Finland | Iceland | Ireland | Poland | Hungary | Romania | Bulgaria | Greece | Turkey | Ukraine | Russia |
Georgia | Egypt | Morocco | Tunisia | Algeria | Kenya | Ethiopia | Nigeria | Ghana | Senegal | South Africa |
Madagascar | India | Nepal | Pakistan | Iran | Iraq | Israel | Jordan | Saudi Arabia | China | Mongolia | Japan |
South Korea | Vietnam | Thailand | Malaysia | Indonesia | the Philippines | Australia | New Zealand | Canada | the
United States | Mexico | Cuba | Jamaica | Guatemala | Panama | Colombia | Venezuela | Ecuador | Peru | Bolivia | Chile
| Argentina | Uruguay | Brazil
""")

THINGS = phrases("""
helium | iron | gold | oxygen | carbon | mercury | silver | copper | sodium | uranium | a dolphin | a penguin | an
elephant | a honey bee | a spider | a shark | an octopus | a whale | a bat | an owl | a kangaroo | a camel | a giraffe
| a tortoise | a frog | a butterfly | an ant | a salmon | a polar bear | a wolf | the Nile | the Amazon | the Sahara |
Mount Everest | the Pacific Ocean | the Eiffel Tower | the Great Wall of China | the Taj Mahal | the Colosseum |
Stonehenge | Machu Picchu | the telephone | the light bulb | the telescope | the microscope | the bicycle | the
aeroplane | the computer | the internet | penicillin | paper | gunpowder | the compass | the radio | television | the
steam engine | a violin | a piano | a trumpet | a guitar | a drum | a haiku | a sonnet | an adjective | a verb | a
metaphor | a prime number | a triangle | a hexagon | a fraction | pi | the speed of light | the boiling point of water
| a leap year | a light year | a byte | a pixel | a modem | Linux | Python | Java | HTML | the Moon | Mars | Jupiter |
Venus | a galaxy | a comet | the equator | a desert | a peninsula | an archipelago | a glacier | a volcano | an
earthquake | a tsunami
""")

NAMES = phrases("""
Amara | Bruno | Chiara | Dmitri | Elif | Farid | Greta | Hana | Ivo | Jun | Kofi | Leila | Mateo | Nadia | Oskar |
Priya | Quentin | Rosa | Sven | Tomas | Uma | Viktor | Wen | Ximena | Yusuf | Zoe | Alice | Ben | Clara | Dan | Emma |
Frank | Gina | Harry | Iris | Jack | Kate | Liam | Mia | Noah | Olga | Paul | Rita | Sam | Tina
""")

GOODS = phrases("""
apples | notebooks | pencils | lamps | chairs | tickets | loaves of bread | bottles of juice | T-shirts | boxes of tea
| candles | postcards | bicycles | kettles | roses | bags of rice | puzzles | umbrellas | mugs | keyboards | tins of
paint | plates | scarves | eggs | stamps | toy trains | cushions | hats | batteries | magazines
""")
